"""Files of weights, checkpoints of a run, and what is refused about them."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file
from ray_yolo.checkpoints.foreign import read_weights
from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.checkpoints.weights_file import local_file
from ray_yolo.checkpoints.writer import Saver
from ray_yolo.core.errors import CheckpointError, InputError, TrainingError
from ray_yolo.core.versioned import FORMAT
from ray_yolo.inference.predictor import load_trained
from ray_yolo.models.families import build_model
from ray_yolo.storage.lease import LEASE, Terms
from ray_yolo.storage.store import FolderStore
from tests.support.checkpoints import begin, save
from tests.support.messages import Refusal
from tests.support.released import write_released
from tests.support.weights import make_weights

X = Path("x.pt")
NO_TORCH_FILE = "x.pt: was not written by torch.save; download it again"
CONVERT = ("convert it in the environment that made it: python -c \"import torch; torch.save(torch.load('best.pt', "
           "weights_only=False)['model'].float().state_dict(), 'weights.pt')\" and give weights.pt")
PICKLED = f"x.pt: holds pickled objects, which are never loaded (…); {CONVERT}"
FORMER = ("x.pt: holds pickled objects, which are never loaded (torch's format before 1.6, of which only plain tensors "
          f"are read); {CONVERT}")
RESEMBLES = "x.pt: has `meta` and `ema`, but not those of a ray_yolo checkpoint; give a .pt file of a run"


class Canary:
    """Unpickling it would leave a trace."""

    def __init__(self, *deed: Any) -> None:
        self.deed = deed

    def __reduce__(self) -> Any:
        return self.deed


DEEDS = {"posix.mkdir": (os.mkdir, ("sung",)), "shutil.copyfile": (shutil.copyfile, ("x.pt", "sung")),
         "builtins.eval": (eval, ("open('sung', 'w')",)), f"{open.__module__}.open": (open, ("sung", "w"))}
"""What a pickle may name, by that name."""

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Hardswish)
"""Of all layers of a model."""

LAYERS: dict[tuple[type[nn.Module], str, Any], str] = {
    (nn.Upsample, "mode", "bilinear"): "11 (Upsample) has mode bilinear, but models here have nearest",
    (nn.Upsample, "scale_factor", 3.0): "11 (Upsample) has scale_factor 3.0, but models here have 2.0",
    (nn.Conv2d, "dilation", (2, 2)): "0.conv (Conv2d) has dilation (2, 2), but models here have (1, 1)",
    (nn.Conv2d, "padding_mode", "reflect"): "0.conv (Conv2d) has padding_mode reflect, but models here have zeros",
    (nn.BatchNorm2d, "eps", 0.1): "0.bn (BatchNorm2d) has eps 0.1, but models here have 0.001"}
"""A setting of the first layer of a class, which no tensor shows."""

CONTENTS = {
    b"\n <!DOCTYPE html><html><title>404</title>": "a page of HTML or XML", b"<html>": "a page of HTML or XML",
    b"\xff\xd8\xff\xe0" + bytes(100): "a JPEG picture", b"\x89PNG\r\n\x1a\n": "a PNG picture",
    b"version https://git-lfs.github.com/spec/v1\n": "a pointer of Git LFS (run `git lfs pull`)",
    b"\x1f\x8b\x08": "a gzip archive",
    b'{"message": "not found"}': "", b"\x08\x08\x12\x07pytorch": "", b"": "",
}
"""Files of other types: how each is named; '' where it is not known."""

METAS = ("hello", "{}", '{"names": 5}', "[1]", '{"names": [1]}', "null")
"""The text of `meta` in a file that resembles a checkpoint."""

RECIPES = {
    "{}": "KeyError: 'recipe'",
    '{"recipe": {}, "architecture": null, "anchors": null}': "RuntimeError: …",
    '{"recipe": {"epochs": "x"}}': "ValidationError: …"}
"""What a checkpoint has beside its names, and what is wrong about it."""

RELEASES = {"yolov5s.pt": "yolov5", "yolov3-tiny.pt": "yolov3", "yolov8n.pt": "assets", "yolov5su.pt": "assets"}
"""Released files that are not there, and the repository of their page."""


def write_bomb(path: Path) -> None:
    """Weights whose zip file is compressed."""
    torch.save({"weight": torch.zeros(1 << 20)}, "plain.pt")
    with zipfile.ZipFile("plain.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))


def write_newer(path: Path) -> None:
    """Weights whose zip file names a version that only torch's reader accepts."""
    torch.save({"weight": torch.zeros(3)}, path)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 6] = 99  # the version that is needed to read the last entry
    path.write_bytes(content)


def write_overlapping(path: Path) -> None:
    """A zip file whose entries are the same bytes under many names."""
    with zipfile.ZipFile(path, "w") as bomb:
        bomb.writestr("data/0", bytes(1 << 16))
        for number in range(1, 20):
            (entry := copy.copy(bomb.filelist[0])).filename = f"data/{number}"
            bomb.filelist.append(entry)


def write_endless(path: Path) -> None:
    """A module that contains itself."""
    inner = nn.Identity()
    inner.add_module("again", inner)
    torch.save({"model": inner}, path)


def write_deep(path: Path) -> None:
    """2^60 paths through 60 modules."""
    inner: nn.Module = nn.Identity()
    for _ in range(60):
        outer = nn.Identity()
        outer._modules = {"a": inner, "b": inner}
        inner = outer
    torch.save({"model": inner}, path)


def write_changed(path: Path, kind: type[nn.Module], name: str, value: Any) -> None:
    """A released model in which the first layer of a class has another setting."""
    model = build_model("yolov5n", 2)
    layer = next(layer for layer in model.modules() if isinstance(layer, kind))
    setattr(layer, name, value)
    write_released(path, model, ["a", "b"])


def write_activated(path: Path, activation: type[nn.Module]) -> None:
    """A released model with another activation."""
    model = build_model("yolov5n", 2)
    for layer in model.modules():
        if type(layer).__name__ == "Conv":
            layer.act = activation()
    write_released(path, model, ["a", "b"])


def _reads(write: Callable[[Path], object], read: Callable[[Path], object] = read_weights, path: Path = X) -> None:
    write(path)
    read(path)


def _saves(content: Any, **options: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(content, path, **options)


def _writes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def _reads_unread(write: Callable[[Path], object]) -> None:
    """Read a file that must not reach torch."""
    write(X)
    with mock.patch.object(torch, "load", None):
        state_file.read_state(X)


def _files() -> Iterator[Refusal]:
    def case(name: str, message: str, cause: Callable[[], object]) -> Refusal:
        return Refusal(name, message, cause, CheckpointError)

    for activation in ACTIVATIONS:
        name = activation.__name__
        yield case(f"activation {name}", f"x.pt: its layer model.… has the activation {name}, but models here have "
                   "SiLU; give weights of a model with SiLU",
                   partial(_reads, partial(write_activated, activation=activation)))
    for (kind, name, value), message in LAYERS.items():
        yield case(f"layer: {name} {value}", f"x.pt: its layer model.{message}; give weights of an unchanged model",
                   partial(_reads, partial(write_changed, kind=kind, name=name, value=value)))
    for named, deed in DEEDS.items():
        yield case(f"names {named}", f"x.pt: names {named}, which is no part of a model; no code of it was run; if you "
                   f"trust it, {CONVERT}", partial(_reads, _saves({"model": nn.Identity(), "git": Canary(*deed)})))
    yield case("modules without end", "x.pt: its modules are nested without end", partial(_reads, write_endless))
    yield case("modules in 2^60 places", "x.pt: its modules are nested without end", partial(_reads, write_deep))
    yield case("tensors larger than the file", "x.pt: its tensors claim to be larger than the file",
               partial(_reads, _saves({"w": torch.zeros(1).expand(1 << 40)})))
    yield case("no tensors", "x.pt: holds no tensors by name, neither plain nor in a model",
               partial(_reads, _saves([1])))
    yield case("a function of the standard library", FORMER, partial(
        _reads, _saves({"model": Canary(copy.copy, (1,))}, _use_new_zipfile_serialization=False)))
    yield case("torch's format before 1.6", FORMER, partial(
        _reads, _saves({"model": nn.Conv2d(1, 1, 1)}, _use_new_zipfile_serialization=False)))
    for content, kind in CONTENTS.items():
        for path in (X, Path("x.safetensors")):
            message = f"{path}: is {kind}, no weights file; download it again from its release page"
            if not kind:
                message = NO_TORCH_FILE if path == X else "x.safetensors: not a readable safetensors file (…)"
            yield case(f"{content[:20]!r} as {path}", message, partial(_reads, _writes(content), path=path))
    for meta in METAS:
        yield case(f"meta {meta}", RESEMBLES, partial(_reads, _saves({"meta": meta, "ema": {"a": torch.zeros(2)}})))
    for more, problem in RECIPES.items():
        meta = json.dumps({"names": ["a"], **json.loads(more)})
        yield case(f"recipe {more}", f"x.pt: is not a checkpoint of this ray_yolo ({problem}); give a .pt file of a "
                   "run", partial(_reads, _saves({"meta": meta, "ema": {"a": torch.zeros(2)}}), load_trained))
    of_a_run, novel = "run/weights/best.pt", {"precision": "fp4"}
    yield case("settings of a later version",
               f"{of_a_run}: written by a later ray_yolo, which this one cannot use (ValidationError: …); use that one",
               partial(_load_rewritten, recipe=novel, format=FORMAT + 1))
    yield case("no settings of this version",
               f"{of_a_run}: is not a checkpoint of this ray_yolo (ValidationError: …); give a .pt file of a run",
               partial(_load_rewritten, recipe=novel, format=FORMAT))
    for name, page in RELEASES.items():
        yield case(f"no {name}", f"{name}: no such weights file; nothing is downloaded automatically: download {name} "
                   f"from https://github.com/ultralytics/{page}/releases (under their licence) to …/{name}, or give "
                   "its path", partial(read_weights, Path(name)))
    for name in ("mine.pt", "x" * 300 + ".pt"):
        yield case(f"no {name[:20]}", f"{name}: no such weights file; give a .pt file of a run, of YOLOv5 or of "
                   "Ultralytics, or a .safetensors file", partial(read_weights, Path(name)))
        yield case(f"no state {name[:20]}",
                   f"{name}: no such weights file; give a .pt file of a run or of plain tensors",
                   partial(state_file.read_state, Path(name)))
    yield case("pickled objects", PICKLED, partial(
        _reads, _saves({"model": Canary(os.mkdir, ("sung",))}), state_file.read_state))
    yield case("a plain pickle", PICKLED, partial(
        _reads, _writes(pickle.dumps(Canary(os.mkdir, ("sung",)))), state_file.read_state))
    inflates = ("x.pt: its contents are compressed, which torch never does, and may inflate beyond the memory; save it "
                "again with torch.save")
    yield case("compressed", inflates, partial(_reads_unread, write_bomb))
    yield case("entries that overlap", inflates, partial(_reads_unread, write_overlapping))
    yield case("a zip file of another version", "x.pt: not a readable weights file (zip file version 9.9); download it "
               "again, or save it again with torch.save", partial(_reads_unread, write_newer))
    for content in (b"", b"not a zip"):
        yield case(f"state {content!r}", NO_TORCH_FILE, partial(_reads, _writes(content), state_file.read_state))
    yield case("a torn zip file", "x.pt: not a readable weights file (File is not a zip file); download it again, or "
               "save it again with torch.save", partial(_reads, _writes(b"PK\x03\x04 broken"), state_file.read_state))


def rewrite(path: Path, **changes: Any) -> None:
    """Write a checkpoint of ours again, as another version would, with other entries in its meta and its manifest."""
    state = state_file.read_state(path)
    meta = json.loads(state["meta"])
    recipe = meta["recipe"] | changes.pop("recipe")
    state["meta"] = json.dumps(meta | changes | {"recipe": recipe})
    manifest = state_file.parse_manifest(path.with_suffix(".json").read_bytes())
    manifest |= state_file.write_state(path, state) | {"format": changes["format"], "novel": True}
    path.with_suffix(".json").write_text(state_file.manifest_text(manifest))


def _load_rewritten(**changes: Any) -> None:
    path = make_weights(Path())
    rewrite(path, **changes)
    load_trained(path)


RUN = Path("run")
RESTORE = "run/weights/{}; restore it from a copy, or remove it, and run the same command again"


def flip_weight(path: Path, number: float) -> None:
    """Change one bit of a weight of `tests.support.checkpoints`, in a file of its own."""
    data = bytearray(path.read_bytes())
    data[data.rindex(torch.full((100,), number).numpy().tobytes()) + 2] ^= 0x40
    path.unlink()
    path.write_bytes(data)


def write_later_format(run_dir: Path) -> None:
    """A newest checkpoint whose manifest has the next format."""
    manifest = save(run_dir, 3, "last") / "MANIFEST.json"
    manifest.write_text(state_file.manifest_text(json.loads(manifest.read_text()) | {"format": FORMAT + 1}))


def _show_first_epoch() -> None:
    for suffix in (".pt", ".json"):
        shutil.copyfile(RUN / "weights" / f"best{suffix}", RUN / "weights" / f"new{suffix}")
        (RUN / "weights" / f"new{suffix}").replace(RUN / "weights" / f"last{suffix}")


def _checked_weights(spoil: Callable[[], object], step: int = 2) -> None:
    begin(RUN)
    spoil()
    checkpoint.check_weights(RUN, step)


def _recovers(spoil: Callable[[], object], digest: str = "digest") -> None:
    begin(RUN)
    spoil()
    checkpoint.recover(RUN, digest)


def _replace_by_folder(name: str) -> None:
    path = RUN / "checkpoints" / "step-2" / name
    path.unlink()
    path.mkdir()


def _tear_all(*, set_aside: bool) -> None:
    save(RUN, 1, "last")
    for path in RUN.glob("checkpoints/*/state.pt"):
        path.write_bytes(b"torn")
    if set_aside:
        checkpoint.set_aside(RUN, newer_than=-1)


def _flipped() -> None:
    save(RUN, 7, "best")
    flip_weight(RUN / "weights" / "best.pt", 7.0)
    state_file.read_state(RUN / "weights" / "best.pt")


def _runs() -> Iterator[Refusal]:
    """What the folder of a run may lack."""
    nothing = Path.cwd
    for name, problem, spoil in (
            ("last.pt is gone", "last.pt: last.pt is missing", lambda: (RUN / "weights" / "last.pt").unlink()),
            ("best.pt is gone", "best.pt: best.pt is missing", lambda: (RUN / "weights" / "best.pt").unlink()),
            ("best.pt is cut", "best.pt: 100 bytes instead of …",
             lambda: os.truncate(RUN / "weights" / "best.pt", 100)),
            ("last.pt is of an earlier epoch", "last.pt: it is of step 1, not of step 2", _show_first_epoch)):
        yield Refusal(name, RESTORE.format(problem), partial(_checked_weights, spoil), TrainingError)
    yield Refusal("the last checkpoint is missing", RESTORE.format("last.pt: it is of step 2, not of step 3"),
                  partial(_checked_weights, nothing, 3), TrainingError)
    yield Refusal("nothing was saved", RESTORE.format("last.pt: last.json is missing"),
                  lambda: checkpoint.check_weights(RUN, 2), TrainingError)
    repair = "; repair the storage or its permissions and run the same command again (nothing was discarded)"
    move = "move checkpoints/ and weights/ away to train from the start, or choose another --name"
    for name, problem, spoil in (
            ("a checkpoint of a later version",
             f"/step-3: written by a later ray_yolo (format {FORMAT + 1}; this one reads {FORMAT}); continue with that "
             "one",
             lambda: write_later_format(RUN)),
            ("a state that is a folder", f"/step-2/state.pt: Is a directory{repair}",
             lambda: _replace_by_folder("state.pt")),
            ("a manifest that is a folder", f"/step-2/MANIFEST.json: Is a directory{repair}",
             lambda: _replace_by_folder("MANIFEST.json")),
            ("torn checkpoints",
             ": no usable checkpoint (step-2: 4 bytes instead of …; step-1: 4 bytes instead of …); restore a "
             f"checkpoint from a copy, {move}", lambda: _tear_all(set_aside=False)),
            ("checkpoints that were set aside",
             f": no usable checkpoint (damaged-step-1; damaged-step-2); restore a checkpoint from a copy, {move}",
             lambda: _tear_all(set_aside=True)),
            ("checkpoints that are gone",
             ": has no checkpoint, although this run has saved some (run/weights/….json); restore a checkpoint from a "
             f"copy, {move}", lambda: shutil.rmtree(RUN / "checkpoints"))):
        yield Refusal(name, f"run/checkpoints{problem}", partial(_recovers, spoil), CheckpointError)
    yield Refusal("a checkpoint of another recipe",
                  f"run/checkpoints/step-2: was trained by another recipe (digest) than this run's (other); {move}",
                  partial(_recovers, nothing, "other"), CheckpointError)
    yield Refusal("a flipped bit", "run/weights/best.pt: its SHA-256 does not match (see best.json); use an older "
                  "checkpoint of the run", _flipped, CheckpointError)


def _stored(spoil: Callable[[FolderStore], object]) -> None:
    """Download what another machine has saved."""
    store = FolderStore(Path("store").absolute())
    RemoteCheckpoints(store, 1).put(save(Path("here"), 1, "last"), 1)
    spoil(store)
    RemoteCheckpoints(store, 1).download(Path("there"), None)


def _delete(prefix: str, store: FolderStore) -> None:
    for entry in store.list(prefix):
        store.delete(f"{prefix}{entry.name}")


def _superseded(act: Callable[[RemoteCheckpoints], object]) -> None:
    store = FolderStore(Path("store").absolute())
    here = RemoteCheckpoints(store, 1)
    here.put(save(Path("here"), 1, "last"), 1)
    store.put(LEASE, Terms(2, "b", "elsewhere 7").to_bytes())
    act(here)


def _mismatched() -> None:
    with mock.patch.dict(os.environ, RAY_YOLO_CACHE=str(Path("cache").absolute())):
        store = FolderStore(Path("exp").absolute())
        save(RUN, 3, "best")
        store.put("weights/best.json", RUN / "weights" / "best.json")
        store.put("weights/best.pt", b"other")
        local_file(f"file://{Path.cwd()}/exp/weights/best.pt")


def _stores() -> Iterator[Refusal]:
    """Checkpoints and weights in a store."""
    unusable = ("checkpoints/ of the store: no usable checkpoint ({}); restore a checkpoint from a copy, or choose "
                "another --name")
    yield Refusal("a stored state that is missing",
                  unusable.format("checkpoints/000001-step-1.json: its state is missing"),
                  partial(_stored, partial(_delete, "states/")), CheckpointError)
    yield Refusal("stored checkpoints that are gone",
                  unusable.format("there is none, although this run has saved last.json"),
                  partial(_stored, partial(_delete, "checkpoints/")),
                  CheckpointError)
    superseded = ("attempt 2 of this run has started (elsewhere 7): the lease of this one, 1, expired, and it stores "
                  "nothing more")
    yield Refusal("a superseded attempt saves", superseded, partial(
        _superseded, lambda here: here.put(save(Path("here"), 3, "last"), 1)), TrainingError)
    yield Refusal("a superseded attempt removes", superseded,
                  partial(_superseded, lambda here: here.remove_newer(0)), TrainingError)
    yield Refusal("an object that mismatches its manifest",
                  "file://…/exp/weights/best.pt: 5 bytes instead of … (see the .json beside it)",
                  _mismatched, CheckpointError)
    yield Refusal("an object that is missing", "file://…/exp/weights/best.pt: there is no such object",
                  lambda: local_file(f"file://{Path.cwd()}/exp/weights/best.pt"), CheckpointError)
    yield Refusal("an address of another kind",
                  "weights: ftp://bucket: give a folder, or an address with s3://, gs://, az:// or file://",
                  lambda: local_file("ftp://bucket/best.pt"), InputError)


def _save(times: int) -> None:
    """Save where storage refuses; the last of so many saves may not fail."""
    saver = Saver(RUN, "recipe", 2, lambda event: None)
    with mock.patch.object(checkpoint, "save_checkpoint", side_effect=OSError(28, "No space left on device")):
        for step in range(1, times + 1):
            saver.save({"meta": "{}"}, step, 0, ("last",))
            saver.wait(needed=step == times)


def _unsaved() -> Iterator[Refusal]:
    """Checkpoints that are not written."""
    for times in (1, 2):
        yield Refusal(f"save {times} fails", f"run: the checkpoint at step {times} could not be written ([Errno 28] No "
                      "space left on device); free or repair the storage and run the same command again",
                      partial(_save, times), TrainingError)


REFUSALS = [*_files(), *_runs(), *_stores(), *_unsaved()]
