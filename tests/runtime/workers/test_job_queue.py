"""The crew alone, on a clock of the test's: who works at which job."""

from __future__ import annotations

import pytest

from ray_yolo.core.errors import ConfigError
from ray_yolo.core.events import Summary
from ray_yolo.core.system import Process
from ray_yolo.runtime.workers.coordinator import Arrival, Beat
from ray_yolo.runtime.workers.job_queue import (
    ABSENCE_SECONDS,
    ENDING_SECONDS,
    IDLE_SECONDS,
    SILENCE_SECONDS,
    Crew,
    News,
    Place,
)

ELSEWHERE = Process("node7", "pid:[1]", 42)
NODES = {"a": "left", "b": "right"}  # of workers; else a third one
JOINING = Beat("joining", 0, 0.0, 30.0)
ENDED = Summary(step=8, epoch=1, best_epoch=1, best_fitness=0.5, stopped_early=False, stopped=False, last_epoch=None)


class Desk:
    """A crew, its clock, and workers a, b, c, ... who speak to it by one letter; jobs have numbers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.crew = Crew(lambda: self.now)
        self.at: dict[str, tuple[str, int]] = {}

    def place(self, name: str) -> Place:
        """Of a worker: a has number 0, b 1, ..."""
        return Place(ord(name) - ord("a"), NODES.get(name, "middle"), ELSEWHERE)

    def offer(self, *jobs: str, wanted: int = 2, most: int = 2, folder: str = "") -> None:
        for job in jobs:
            self.crew.offer(job, folder or f"trial{job}", wanted, most, {"of": job})

    def ask(self, names: str) -> list[tuple[str, int] | str | None]:
        """What each is given: (job, number)."""
        for name in names:
            lease = self.crew.ask(name, self.place(name))
            if isinstance(lease, tuple):
                assert lease.config == {"of": lease.job}
                self.at[name] = lease[:2]
        return [self.at.get(name) if isinstance(lease, tuple) else lease for name in names]

    def beat(self, names: str) -> list[bool]:
        return [self.crew.beat(name, self.place(name), self.at[name], True) for name in names]

    def end(self, names: str, outcome: Summary | Exception | None = ENDED) -> None:
        for name in names:
            self.crew.ended(name, self.place(name), self.at.pop(name), outcome)

    def pass_by(self, seconds: float, busy: str = "", jobs: str = "") -> None:
        """Seconds pass, in each of which those who are busy send a beat, and jobs are asked for."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.beat(busy)
            for job in jobs:
                assert isinstance(self.crew.news(job), News)

    def failures(self, job: str) -> list[tuple[int, str]]:
        news = self.crew.news(job)
        assert isinstance(news, News)
        return [(number, "lost" if error is None else str(error)) for number, error in news.failures]


def working() -> Desk:
    """a and b train job 1, c and d job 2."""
    desk = Desk()
    desk.offer("1", "2")
    for name in "abcd":
        desk.ask(name)
    assert desk.at == {"a": ("1", 0), "b": ("1", 1), "c": ("2", 0), "d": ("2", 1)}
    return desk


def test_workers_go_from_job_to_job_in_the_order_of_the_offers() -> None:
    desk = working()
    desk.offer("3", "4", "5")
    desk.end("cd")
    assert desk.crew.news("2") == News(ENDED, ())
    for name in "cd":
        desk.ask(name)
    desk.end("ab")
    for name in "ab":
        desk.ask(name)
    assert desk.at == {"c": ("3", 0), "d": ("3", 1), "a": ("4", 0), "b": ("4", 1)}
    assert desk.ask("e") == [("5", 0)]
    assert desk.crew.news("6") is None


def test_a_job_has_ended_when_all_its_workers_have_or_their_time_is_up() -> None:
    desk = working()
    desk.end("a")
    assert desk.crew.news("1") == News(None, ())
    assert desk.ask("a") == [None]  # an ended job needs nobody
    desk.end("b")
    assert desk.crew.news("1") == News(ENDED, ())
    desk.end("c")
    desk.pass_by(ENDING_SECONDS, "d")
    assert desk.crew.news("2") == News(None, ())
    desk.pass_by(1, "d")
    assert desk.crew.news("2") == News(ENDED, ())


def test_a_silent_worker_is_lost_and_another_one_takes_its_number() -> None:
    desk = working()
    desk.pass_by(SILENCE_SECONDS + 1, "acd", "12")
    assert desk.crew.present() == 3
    desk = working()
    desk.pass_by(SILENCE_SECONDS, "acd", "12")
    desk.now += 0.5
    assert desk.failures("1") == [(1, "lost")]
    assert desk.ask("e") == [None]  # until the failure was judged
    assert desk.failures("1") == []
    desk.ask("e")
    assert desk.at["e"] == ("1", 1)
    desk.beat("b")  # was only slow: both stay, the job's roster takes it in as well
    assert desk.crew.present() == 5


def test_a_failure_is_told_to_who_has_offered_the_job_and_to_nobody_else() -> None:
    desk = working()
    desk.end("ab", ConfigError("lr0: bad"))
    assert desk.ask("ab") == [None, None]
    assert desk.failures("1") == [(0, "lr0: bad"), (1, "lr0: bad")]
    desk.crew.withdraw("1")
    desk.offer("3")
    for name in "ab":
        desk.ask(name)
    assert desk.at["b"] == ("3", 1)
    assert desk.failures("2") == []


def test_a_job_for_which_nobody_asks_any_more_is_given_to_nobody() -> None:
    desk = Desk()
    desk.offer("1")
    desk.now += ABSENCE_SECONDS + 1
    assert desk.ask("a") == [None]
    desk.crew.news("1")  # it was only slow
    assert desk.ask("a") == [("1", 0)]


def test_a_folder_is_given_to_another_attempt_once_nobody_works_in_it() -> None:
    desk = Desk()
    desk.offer("1", wanted=1)
    desk.ask("a")
    desk.crew.withdraw("1")  # its trial died
    desk.offer("2", wanted=1, folder="trial1")
    assert desk.ask("b") == [None]
    desk.end("a", None)
    assert desk.ask("b") == [("2", 0)]


def test_idle_workers_help_where_they_can_and_are_called_back() -> None:
    desk = Desk()
    desk.offer("1", "2", most=3)
    for name in "abcdef":
        desk.ask(name)
    assert desk.at.keys() == set("abcd")
    desk.pass_by(IDLE_SECONDS - 1, "abcd", "12")
    assert desk.ask("ef") == [None, None]
    desk.pass_by(1, "abcd", "12")
    assert desk.ask("ef") == [("1", 2), ("2", 2)]
    desk.offer("3")
    assert desk.beat("abcdef") == [False] * 5 + [True]
    assert desk.beat("abcdef") == [False] * 5 + [True]  # one after the other
    desk.end("f", None)
    assert desk.ask("f") == [("3", 0)]
    assert desk.beat("abcdef") == [False] * 4 + [True, False]


def test_workers_of_a_node_that_is_taken_away_leave_after_the_step_and_are_no_failures() -> None:
    desk = working()
    assert desk.crew.part_from({"left"}) == {0: "left"}
    assert desk.beat("abcd") == [True, False, False, False]
    desk.end("a", None)
    assert desk.ask("a") == ["leave"]
    assert desk.crew.part_from({"left", "right"}) == {1: "right"}
    desk.crew.lose([1])  # with its node, before it could leave
    assert desk.failures("1") == []
    assert desk.ask("e") == [("1", 0)]
    desk.crew.lose([2])
    assert desk.failures("2") == [(0, "lost")]
    desk.crew.part_from(set())
    assert desk.ask("a") == [("1", 1)]


def test_the_part_of_a_worker_that_leaves_is_given_to_an_idle_one() -> None:
    """One that got SIGTERM, and one on a node that is taken away: a single worker saves and trains on until then."""
    desk = working()
    assert desk.ask("e") == [None]
    desk.crew.part("d")
    desk.crew.part("nobody")
    assert desk.ask("e") == [("2", 2)]
    assert desk.beat("abcd") == [False, False, False, True]
    desk.crew.part_from({"left"})
    assert desk.ask("f") == [("1", 2)]


@pytest.mark.parametrize("asks", ["ask", "news"])
def test_when_it_is_over_everybody_is_told(asks: str) -> None:
    desk = working()
    assert desk.crew.progress() == 4  # have come up
    desk.beat("ab")
    assert desk.crew.progress() == 6
    desk.crew.close("the sweep has ended")
    assert (desk.ask("e") == ["over"]) if asks == "ask" else (desk.crew.news("1") == "the sweep has ended")


def test_each_job_has_a_roster_of_its_own_which_outlives_it() -> None:
    desk = Desk()
    desk.offer("1", "2")
    for job, name in (("1", "a"), ("2", "b")):
        desk.crew.roster(job, 1, "arrive", name, Arrival(0, ELSEWHERE, (name, 1), None, JOINING))
    assert [desk.crew.roster(job, 1, "formed", name).address for job, name in (("1", "a"), ("2", "b"))] == [
        ("a", 1), ("b", 1)]
    desk.crew.withdraw("1")
    desk.crew.roster("1", 1, "end", ENDED)
    assert [desk.crew.roster(job, 1, "outcome") for job in "12"] == [ENDED, None]


def test_a_crew_that_was_restarted_hears_of_its_workers_before_it_gives_work_away() -> None:
    """Else an idle one would begin a job beside those who train it, and a job's roster another generation."""
    desk = working()
    desk.crew = Crew(lambda: desk.now, restarted=True)
    desk.offer("1", "2", wanted=2)
    assert desk.ask("e") == [None]
    desk.crew.roster("1", 1, "arrive", "e", Arrival(4, ELSEWHERE, ("e", 1), None, JOINING))
    assert desk.crew.roster("1", 1, "formed", "e") is None
    desk.pass_by(4, "abcd", "12")
    assert desk.ask("e") == [None]
    desk.crew.roster("1", 1, "beat", "e", JOINING)
    assert desk.crew.roster("1", 1, "formed", "e").num_workers == 1
    desk.offer("3", wanted=1)
    assert desk.ask("e") == [("3", 0)]
    desk.crew.roster("3", 1, "arrive", "e", Arrival(0, ELSEWHERE, ("e", 1), None, JOINING))
    assert desk.crew.roster("3", 1, "formed", "e").num_workers == 1  # a new job's waits for nobody


def test_what_is_known_does_not_grow_with_the_jobs_that_have_ended() -> None:
    desk = Desk()
    for number in range(1_000):
        job = str(number)
        desk.offer(job, wanted=1, most=1)
        desk.ask("a")
        desk.crew.roster(job, 1, "arrive", job, Arrival(0, ELSEWHERE, (job, 1), None, JOINING))
        desk.end("a")
        desk.crew.withdraw(job)
        desk.crew.roster(job, 1, "end", ENDED)
    assert desk.crew.roster("950", 1, "outcome") == ENDED  # its workers may still ask
    assert all(len(value) <= 101 for value in vars(desk.crew).values() if hasattr(value, "__len__"))
