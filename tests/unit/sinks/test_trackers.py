"""Trackers that packages offer by entry points: which are found, which are refused, and the example of the page."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from ray_yolo.config.placement import Placement, RunConfig
from ray_yolo.core.errors import InputError
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runtime.preflight import check_early
from ray_yolo.sinks.records import RunRecords, build_records, read_settings
from ray_yolo.sinks.trackers import GROUP
from tests.support import run_log
from tests.support.packages import write_package
from tests.unit.test_docs import PAGES

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package with one module, `NAME_tracker`, whose class is the tracker NAME."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install_one(package: str, entry: str) -> None:
        write_package(site, package, GROUP, entry)
        [example] = re.findall(r"```python\n(.*?)```", PAGES["trackers"], re.DOTALL)
        (site / "team_tracker.py").write_text(example)

    yield install_one
    sys.modules.pop("team_tracker", None)


def test_example_of_the_page_holds_each_number_once(
        install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [toml] = re.findall(r"```toml\n.*?\n(team = .*?)\n```", PAGES["trackers"])
    install("team", toml.replace('"', ""))
    monkeypatch.setenv("TEAM_TABLE", str(tmp_path / "team.db"))
    run_dir = tmp_path / "exp"
    run_dir.mkdir()
    (run_dir / "opt.yaml").write_text("placement: {noplots: true, trackers: team}\n")
    settings = read_settings(run_dir, None, tmp_path)
    stories = ([run_log.run(), run_log.start(), *run_log.trained_epoch(0), run_log.epoch(1)],
               [run_log.start(10), *run_log.trained_epoch(1), run_log.end(20)])
    counts = []
    for story in stories:  # the second start is a process of its own
        run_log.write(run_dir / EVENTS_FILE, story)
        records = RunRecords(run_dir, build_records(run_dir, settings, pytest.fail), pytest.fail)
        records.update(ended=False)
        records.update(ended=True)
        with closing(sqlite3.connect(tmp_path / "team.db")) as table:
            counts.append(table.execute("select epoch, count(*) from metrics group by epoch").fetchall())
    assert counts == [[(1, 4)], [(1, 4), (2, 4)]]


def test_unusable_tracker_is_refused_before_a_start(install: Install) -> None:
    install("team", "team = nowhere:TeamTable")
    with pytest.raises(InputError):
        check_early(RunConfig(placement=Placement(num_workers=0, trackers="team")))


@pytest.mark.parametrize("names", ["wandb,", "a b", "wandb,wandb"])
def test_setting_of_names_is_checked(names: str) -> None:
    with pytest.raises(ValidationError):
        Placement(trackers=names)


def test_tracker_that_was_uninstalled_fails_alone(tmp_path: Path) -> None:
    run_log.write(tmp_path / EVENTS_FILE, [run_log.run(), run_log.start(), *run_log.trained_epoch(0), run_log.end(10)])
    (tmp_path / "opt.yaml").write_text("placement: {noplots: true, trackers: gone}\n")
    warnings: list[str] = []
    records = RunRecords(tmp_path, build_records(tmp_path, read_settings(tmp_path, None, tmp_path), warnings.append),
                         warnings.append)
    records.update(ended=True)
    assert records.pending == ["gone"]
    assert ["'gone' is not installed" in text for text in warnings] == [True]
    assert (tmp_path / "results.csv").exists()
