"""Runs that a command cannot continue, begin, compare or show, and storage that cannot hold them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from ray_yolo import cli
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.config.sections import OptimizerConfig
from ray_yolo.core import files
from ray_yolo.core.errors import RayYoloError, StorageError, TrainingError
from ray_yolo.core.events import Event, WarningEvent
from ray_yolo.core.versioned import FORMAT
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runs.folders import output_folder
from ray_yolo.runs.remote_run import put_results
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runs.run_record import (
    RECORD_FILE,
    DamagedRecordError,
    FolderRecord,
    RunRecord,
    SweepRecord,
    read_record,
    write_record,
)
from ray_yolo.runs.status import describe_run
from ray_yolo.runs.steps import choose_step, logged_steps
from ray_yolo.runs.usage import Usage, cost_table, parse_prices
from ray_yolo.runs.verification import compare_runs
from ray_yolo.runs.worker_lock import WORKERS_LOCK, await_former_workers
from ray_yolo.storage.lease import check_conditions, read_terms
from ray_yolo.storage.store import FolderStore
from tests.support import run_log
from tests.support.checkpoints import save
from tests.support.messages import Refusal

RECIPE, OTHER = Recipe(seed=1), Recipe(seed=2)
SWEEP = SweepRecord(digest=recipe_digest(RECIPE), space="my space.yaml", trials=3)
COMPARISON = SWEEP.model_copy(update={"space": "", "is_comparison": True})
MINE = "…/here/p/mine"
IN_BUCKET = "file://…/here/bucket/p/mine"
BUCKET = "s3://no-such-bucket/x"

Finding = tuple[str, Callable[[Placement], object], dict[str, Any], str]
"""A name; what is there; what the command asks for, as settings of a placement, and possibly a recipe; the answer."""


def record_of(recipe: Recipe, **changes: Any) -> RunRecord:
    """The record of a training that never took place."""
    return RunRecord.model_validate({
        "digest": recipe_digest(recipe), "asked": recipe, "recipe": recipe, "architecture": None, "anchors": None,
        "num_parameters": 1, "names": ("a",), "labels": "", "command": "", "provenance": {}} | changes)


def _hold(where: Placement, record: FolderRecord | None = None) -> Run:
    """A run that is being trained."""
    return begin_run(where, record or record_of(RECIPE))


def _interrupt(where: Placement, record: FolderRecord | None = None) -> None:
    """A run that no process trains, with two checkpoints and the weights of an epoch."""
    run = _hold(where, record)
    if run.remote is None:
        for step in (1, 2):
            save(run.folder, step, "last", f"epoch{step}")
    run.release()


def _finish(where: Placement) -> None:
    run = _hold(where)
    run.finish()
    run.release()


def _damage(where: Placement) -> None:
    _interrupt(where)
    Path(where.project, where.name, RECORD_FILE).write_text("{")


def _nothing(where: Placement) -> None:
    pass


WAYS = f"choose another --name, add --exist-ok to start over (the old run is moved aside), or continue from its " \
       f"weights with --weights {MINE}/weights/last.pt"
OLDER = "a run continues from its newest checkpoint, step-2; give the run's folder, or start another run from these " \
        "weights with --weights or --from"
KEEPS = f"and a run keeps its recipe; leave that out, or start a new run with --weights {MINE}/weights/last.pt"
HELD = "is being trained by another process (… …); wait for it, or choose another --name"
NEITHER = "is neither a run folder nor inside one (a run folder holds run.json)"
CHANGED = Recipe(epochs=7, data="/old/a.yaml", optimizer=OptimizerConfig(lr0=0.02))
WITHOUT_LOCKS = "this file system cannot lock files (No locks available), and without locks two commands would train " \
                "the same run; mount it with locks (Lustre: -o flock; NFS: not nolock), or give a --storage-path on " \
                "another one"

FOUND: list[Finding] = [
    ("a finished run", _finish, {"name": "mine"}, f"name: {MINE} is finished; {WAYS}"),
    ("a finished run in a folder with a space", _finish, {"name": "mine", "project": "Ann's runs"},
     "name: …/here/Ann's runs/mine is finished; choose another --name, add --exist-ok to start over (the old run is "
     "moved aside), or continue from its weights with --weights '…/here/Ann'\"'\"'s runs/mine/weights/last.pt'"),
    ("a run of another recipe", _interrupt, {"name": "mine", "recipe": OTHER},
     f"name: {MINE} is a run of another recipe or data set; {WAYS}"),
    ("a run that is trained", _hold, {"name": "mine"}, f"{MINE} {HELD}"),
    ("a sweep", partial(_interrupt, record=SWEEP), {"name": "mine"}, f"name: {MINE} is a sweep; {WAYS}"),
    ("a damaged record", _damage, {"name": "mine"},
     f"{MINE}/run.json: is damaged (…); restore it from a copy, or …"),
    ("resume: nothing there", _nothing, {"resume": "nothing"}, f"resume: nothing {NEITHER}"),
    ("resume: nothing unfinished", _finish, {"resume": "auto"},
     "resume: no unfinished run under …/here/p; name a run folder or a checkpoint"),
    ("resume: finished", _finish, {"resume": "p/mine"},
     f"resume: {MINE} is finished; start a new run with --weights {MINE}/weights/last.pt"),
    ("resume: trained", _hold, {"resume": "p/mine"}, f"{MINE} {HELD}"),
    ("resume: a sweep", partial(_interrupt, record=SWEEP), {"resume": "p/mine"},
     f"resume: {MINE} is a sweep; to continue it, run its python -m ray_yolo.tune command again (--space 'my "
     "space.yaml')"),
    ("resume: a comparison", partial(_interrupt, record=COMPARISON), {"resume": "p/mine"},
     f"resume: {MINE} is a comparison; to continue it, run its python -m ray_yolo.compare command again"),
    ("resume: an older checkpoint", _interrupt, {"resume": "p/mine/checkpoints/step-1"},
     f"resume: {MINE}/checkpoints/step-1: {OLDER}"),
    ("resume: an older state", _interrupt, {"resume": "p/mine/checkpoints/step-1/state.pt"},
     f"resume: {MINE}/checkpoints/step-1/state.pt: {OLDER}"),
    ("resume: the weights of an epoch", _interrupt, {"resume": "p/mine/weights/epoch2.pt"},
     f"resume: {MINE}/weights/epoch2.pt: {OLDER}"),
    ("resume: another seed", _interrupt, {"resume": "auto", "recipe": OTHER},
     f"resume: {MINE} was started with seed=1 (not 2), {KEEPS}"),
    *((f"resume: other {given}", partial(_interrupt, record=record_of(CHANGED)),
       {"resume": "p/mine", "recipe": Recipe.model_validate(given)},
       f"resume: {MINE} was started with {difference}, {KEEPS}") for given, difference in [
           ({"epochs": 100}, "epochs=7 (not 100)"),
           ({"optimizer": {"lr0": 0.01}}, "optimizer.lr0=0.02 (not 0.01)"),
           ({"batch_size": 15, "epochs": 8}, "batch_size=None (not 15), epochs=7 (not 8)")]),
]
"""Runs of the project p that a training finds."""

STORED: list[Finding] = [
    ("a finished run in a bucket", _finish, {"name": "mine"},
     f"name: {IN_BUCKET} is finished; choose another --name, or continue from its weights with --weights "
     f"{IN_BUCKET}/weights/last.pt"),
    ("a run in a bucket that is trained", _hold, {"name": "mine"}, f"…/cache/…/mine {HELD}"),
    ("resume: nothing there in a bucket", _nothing, {"resume": "file://{}/bucket/p/none"},
     f"resume: file://…/here/bucket/p/none {NEITHER}"),
    ("resume: finished in a bucket", _finish, {"resume": "file://{}/bucket/p/mine/"},
     f"resume: {IN_BUCKET} is finished; start a new run with --weights {IN_BUCKET}/weights/last.pt"),
]
"""The same in a bucket, a folder of this machine."""

PLACEMENTS: list[tuple[dict[str, Any], str]] = [
    ({"exist_ok": True, "name": "mine"},
     "exist_ok: a run in a bucket cannot be moved aside; choose another --name, or remove it there"),
    ({"project": "/runs"}, "project: /runs leads out of --storage-path; give a relative one"),
    ({"project": "../runs"}, "project: ../runs leads out of --storage-path; give a relative one"),
    ({"project": "s3://bucket/x"}, "project: s3://bucket/x is an address; give it as --storage-path"),
    ({"storage_path": "ftp://x"},
     "storage_path: ftp://x/runs/train: give a folder, or an address with s3://, gs://, az:// or file://"),
]
"""Placements in a bucket that does not exist, which nothing asks."""

WRITABLE = "give a --project and --storage-path that runs can be written to"
UNWRITABLE = {"file/below": "Not a directory", "x" * 300: "File name too long",
              "/proc/none": "No such file or directory"}
"""Projects that cannot be made beside a file, and the reason."""

DAMAGED = ["", "{", "[]", "{}", "null", '{"digest": "ab"}', '{"format": "?", "digest": "ab"}']
"""Contents of run.json."""

SUCH = "give the folder of a run, such as runs/train/exp"
VERIFIED = {
    "nothing": f"nothing: no such file or folder; {SUCH}", "nothing.pt": f"nothing.pt: no such file or folder; {SUCH}",
    "a/events.jsonl": f"a/events.jsonl: has neither checkpoints nor weights; {SUCH}, or a .pt file in it",
    "a": f"a: has neither checkpoints nor weights; {SUCH}, or a .pt file in it",
    "file://{}/bucket/none":
        "file://…/here/bucket/none: has no log of a run; give the address of one, such as s3://bucket/runs/train/exp",
}
"""The word of `verify`, in a folder with the log of a training, a."""

COMPARED = {
    "a/events.jsonl b": "a/events.jsonl: is not a run folder; give the folders of two runs",
    "a b": "a and b have saved no step in common (steps 2, 4; steps 3); train them with the same --save-steps",
}
"""Two runs that cannot be compared."""

HOURS: list[tuple[Usage, str]] = [
    (Usage({"on-demand": 2.0}, {"on-demand": 0.0}, "GPU hours"),
     "2.00 GPU hours of type on-demand; add on-demand=PRICE"),
    (Usage({"unknown": 2.0}, {"unknown": 0.0}, "worker hours"),
     "2.00 worker hours of type unknown; their nodes have no label ray.io/market-type; add unknown=PRICE"),
]
"""Hours without a price."""

EXAMPLE = "for example --price spot=0.9,on-demand=3.1"
GIVE = f"give TYPE=PRICE, {EXAMPLE}; the types are spot, on-demand, unknown"
PRICES = {
    "0.9": f"got '0.9'; {GIVE}", "reserved=1": f"got 'reserved=1'; {GIVE}", "spot": f"got 'spot'; {GIVE}",
    "spot=1,": f"got ''; {GIVE}", "Spot=1": f"got 'Spot=1'; {GIVE}", "spot=1,5": f"got '5'; {GIVE}",
    "spot=1,spot=2": f"spot is given twice; give it once, {EXAMPLE}",
    **{f"spot={price}": f"spot={price}: a price is a number >= 0, {EXAMPLE}"
       for price in ("-1", "nan", "inf", "", "$1")},
}

STEPS: list[tuple[str, tuple[float | None, ...], str]] = [
    ("nan", (1.0, 2.0), "loss and gradient of every step in the log are finite; use --step, --around spike, or "
                        "--around worst"),
    ("worst", (None,), "the log has no step with a finite loss; use --around nan"),
    ("spike", (1.0, None), "the log has fewer than two steps with a finite loss"),
]
"""Losses of a log that has no such step."""


def _placement(settings: dict[str, Any]) -> Placement:
    given = {"storage_path": ".", "project": "p", **settings}
    return Placement.model_validate({name: value.format(os.getcwd()) if isinstance(value, str) else value
                                     for name, value in given.items()})


def _find(prepare: Callable[[Placement], object], asked: dict[str, Any], storage: str = ".") -> None:
    recipe = asked.get("recipe", RECIPE)
    where = _placement({"storage_path": storage, **{name: asked[name] for name in asked.keys() - {"recipe"}}})
    there = prepare(where.model_copy(update={"name": "mine", "resume": ""}))
    try:
        find_run(recipe, where)
    finally:
        if isinstance(there, Run):
            there.release()


def _begin_twice() -> None:
    where = _placement({"name": "mine"})
    _interrupt(where)
    begin_run(where, record_of(OTHER))


def _begin_without_locks() -> None:
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))):
        find_run(RECIPE, _placement({"name": "mine"}))


def _begin_on_a_full_disk() -> None:
    with mock.patch.object(files, "sync", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")):
        _hold(_placement({"name": "mine"}))


def _find_unwritable(project: str, find: Callable[[Placement], object]) -> None:
    Path("file").touch()
    find(_placement({"project": project, "name": "mine"}))


def _look(settings: dict[str, Any]) -> None:
    find_run(RECIPE, Placement.model_validate({"storage_path": BUCKET, **settings}))


def _sweep_over_a_training() -> None:
    where = _placement({"name": "mine"})
    _interrupt(where)
    find_run(RECIPE, where, extends=lambda folder: False)


def _move_aside(file: str) -> None:
    """Make room for results in a folder with a source, or with a training."""
    path = Path("p/mine", file).absolute()
    path.parent.mkdir(parents=True)
    path.touch()
    output_folder(_placement({"name": "mine", "exist_ok": True}), [] if file == RECORD_FILE else [str(path)])


def _results_in_a_bucket() -> None:
    FolderStore(Path("bucket/p").absolute()).put("mine/results.json", b"")
    output_folder(_placement({"storage_path": "file://{}/bucket", "name": "mine", "exist_ok": True}))


def _begin_where_storage_refuses() -> None:
    with mock.patch.object(FolderStore, "put", side_effect=OSError("AccessDenied")):
        _hold(_placement({"storage_path": "file://{}/bucket"}))


def _find_where_conditions_are_ignored(kind: str) -> None:
    put_if = FolderStore.put_if

    def careless(self: FolderStore, key: str, data: bytes, version: object = None) -> object:
        if (version is None) != (kind == "create"):
            return put_if(self, key, data, version)
        self.put(key, data)
        return self.get(key).version

    with mock.patch.object(FolderStore, "put_if", careless):
        find_run(RECIPE, _placement({"storage_path": "file://{}/bucket"}))


def _probe_where_conditions_are_refused(calls: int) -> None:
    """Probe a store that refuses conditions from one of its calls on."""
    store = FolderStore(Path("bucket").absolute())
    answers = iter([store.put_if] * (calls - 1))
    with mock.patch.object(store, "put_if", lambda *given: next(answers, lambda *_: None)(*given)):
        check_conditions(store, "s3://bucket")


def _take_no_lease() -> None:
    store = FolderStore(Path("bucket").absolute())
    store.put("exp/lease.json", b"{}")
    read_terms(store, "exp/lease.json")


def _flush_over_another_segment() -> None:
    run = _hold(_placement({"storage_path": "file://{}/bucket", "name": "mine"}))
    assert run.remote
    FolderStore(Path("bucket/p/mine").absolute()).put("log/000001-000000.jsonl", b"other")
    log = EventLog(run.folder / EVENTS_FILE)
    log.append(WarningEvent(message="a"))
    log.close()
    try:
        run.remote.flush_log()
    finally:
        run.release()


def _put_where_a_file_is() -> None:
    Path("exp").mkdir()
    Path("exp/results.json").write_text("{}")
    Path("bucket").touch()
    put_results(Path("exp"), f"file://{os.getcwd()}/bucket/runs/val/exp")


def _read(content: str) -> None:
    Path(RECORD_FILE).write_text(content)
    read_record(Path())


def _read_later() -> None:
    write_record(Path(), SWEEP.model_copy(update={"format": FORMAT + 1}))
    read_record(Path())


def _verify(word: str) -> None:
    _log("a", run_log.checkpoint(2))
    cli.verify([word.format(os.getcwd())])


def _compare(one: str, other: str) -> None:
    for folder, steps in (("a", (2, 4)), ("b", (3,))):
        _log(folder, *(run_log.checkpoint(step).model_copy(update={"digest": "x"}) for step in steps))
    compare_runs(Path(one), Path(other))


def _log(folder: str, *events: Event) -> None:
    Path(folder).mkdir()
    run_log.write(Path(folder, EVENTS_FILE), events)


def _choose(losses: Iterable[float | None], around: Any) -> None:
    steps = [run_log.step(number, loss=(loss, 0.0, 0.0)) for number, loss in enumerate(losses, 1)]
    choose_step(logged_steps(steps), around)


def _await_workers() -> None:
    """Workers of a driver that has ended; two clients of a network file system have mixed the lines of their lock."""
    Path("mine").mkdir()
    file = Path("mine", WORKERS_LOCK)
    file.write_bytes(b"a\tb\nhost\tboot pid:[1]\t12host\n\xff\n")
    with file.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        await_former_workers(Path("mine"), lambda text: None, wait_seconds=0.1)


def _refusals() -> Iterator[Refusal]:
    for name, prepare, asked, message in FOUND:
        error = DamagedRecordError if prepare is _damage else RayYoloError
        yield Refusal(name, message, partial(_find, prepare, asked), error)
    for name, prepare, asked, message in STORED:
        yield Refusal(name, message, partial(_find, prepare, asked, "file://{}/bucket"))
    for settings, message in PLACEMENTS:
        yield Refusal(f"in a bucket: {settings}", message, partial(_look, settings))
    yield Refusal("a training, by a sweep", f"name: {MINE} is a training; {WAYS}", _sweep_over_a_training)
    yield Refusal("a name that is taken", f"name: another process has just created {MINE}; choose another --name",
                  _begin_twice)
    yield Refusal("no locks", f"…/here/.ray_yolo-…: {WITHOUT_LOCKS}", _begin_without_locks)
    yield Refusal("a full disk", f"…: No space left on device; {WRITABLE}", _begin_on_a_full_disk, StorageError)
    for project, reason in UNWRITABLE.items():
        yield Refusal(f"a project {project}", f"…: {reason}; {WRITABLE}",
                      partial(_find_unwritable, project, partial(find_run, RECIPE)), StorageError)
        yield Refusal(f"results in {project}", f"…: {reason}; {WRITABLE}",
                      partial(_find_unwritable, project, output_folder), StorageError)
    for file in ("pictures/1.png", RECORD_FILE):
        yield Refusal(f"results over {file}", f"name: {MINE} holds {file}, so it is not moved aside for new "
                      "results; choose another --name or --project", partial(_move_aside, file))
    yield Refusal("results over results in a bucket", f"exist_ok: {IN_BUCKET}: results in a bucket cannot be moved "
                  "aside; choose another --name, or remove them there", _results_in_a_bucket)
    yield Refusal("storage that refuses", f"AccessDenied; {WRITABLE}", _begin_where_storage_refuses, StorageError)
    for kind, header in (("create", "If-None-Match"), ("replace", "If-Match")):
        yield Refusal(f"storage that ignores {header}", "storage_path: file://…/here/bucket/p ignores conditional "
                      f"writes ({header}), without which two commands would train the same run; use a bucket whose "
                      "server supports them, or a folder", partial(_find_where_conditions_are_ignored, kind))
    for calls, header in ((1, "If-None-Match"), (3, "If-Match")):
        yield Refusal(f"storage that refuses {header}", "storage_path: s3://bucket refuses conditional writes "
                      f"({header}), without which two commands would train the same run; use a bucket whose server "
                      "supports them, or a folder", partial(_probe_where_conditions_are_refused, calls))
    yield Refusal("no lease", "exp/lease.json: is not a lease of this ray_yolo; remove it if no process trains "
                  "this run", _take_no_lease)
    yield Refusal("a segment of another process", f"{IN_BUCKET}/log/000001-000000.jsonl was written by another "
                  "process; this one stores nothing more", _flush_over_another_segment, TrainingError)
    yield Refusal("results that storage refuses", "file://…/bucket/runs/val/exp: some results are not stored (…); all "
                  "of them are in exp", _put_where_a_file_is, RayYoloError)
    for content in DAMAGED:
        yield Refusal(f"a record: {content!r}", "run.json: is damaged (…); restore it from a copy…",
                      partial(_read, content), DamagedRecordError)
    yield Refusal("a record of a later version", "run.json: written by a later ray_yolo; continue with that one, or "
                  "move its folder away", _read_later)
    for word, message in VERIFIED.items():
        yield Refusal(f"verify {word}", message, partial(_verify, word))
    for words, message in COMPARED.items():
        yield Refusal(f"compare {words}", message, partial(_compare, *words.split()))
    yield Refusal("status of no run", f".: has no events.jsonl; {SUCH}", partial(describe_run, Path()))
    for usage, message in HOURS:
        yield Refusal(f"hours: {usage.unit}", f"--price: has no price for {message}",
                      partial(cost_table, usage, {"spot": 1.0}))
    for text, message in PRICES.items():
        yield Refusal(f"--price {text}", f"--price: {message}", partial(parse_prices, text))
    for around, losses, message in STEPS:
        yield Refusal(f"--around {around}", f"--around {around}: {message}", partial(_choose, losses, around))
    yield Refusal("workers of another driver", "mine is still being trained by workers of a driver that has ended "
                  "(unknown ones; mine/.workers… is locked); end them, then run the same command again", _await_workers)


REFUSALS = list(_refusals())
