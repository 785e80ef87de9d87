"""Typical mistakes: each command line with parts of the one line that says what is wrong, where, and what to do.

The command ends with 2 before it has made anything, and without a traceback.
"""

from __future__ import annotations

import json
import shlex
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_yolo import cli
from ray_yolo.cli import run
from tests.support.jobs import TINY, make_dataset
from tests.support.pictures import smooth_picture, write_image
from tests.support.weights import make_weights

pytestmark = pytest.mark.usefixtures("own_signal_handlers")

KNOWN = {"DATA": "data/data.yaml", "BEST": "w/run/weights/best.pt", "IMAGES": "data/images/val"}

WORDS = [
    ("train --bathc-size 16", "unknown flag --bathc-size", "did you mean --batch-size?"),
    ("train --epoch 3", "unknown flag --epoch", "did you mean --epochs?"),
    ("train --lr 0.1", "unknown flag --lr", "did you mean --set optimizer.lr0=VALUE?"),
    ("train --lr0 0.1", "--lr0 is not a flag", "write --set optimizer.lr0=VALUE"),
    ("train --mosaics 0", "unknown flag --mosaics", "did you mean --set augment.mosaic=VALUE?"),
    ("train --epochs three", "--epochs: got 'three'", "expected a whole number >= 1"),
    ("train --epochs 0", "--epochs: got '0'", "expected a whole number >= 1"),
    ("train --epochs 2.5", "--epochs: got '2.5'", "expected a whole number >= 1"),
    ("train --epochs", "--epochs: expected one argument", "see python -m ray_yolo.train --help"),
    ("train --batch-size 0", "--batch-size: got '0'", "must be 1 or more, or -1"),
    ("train --batch-size sixteen", "--batch-size: got 'sixteen'", "expected a whole number"),
    ("train --imgsz 65", "--imgsz: got '65'", "nearest: 64 or 96"),
    ("train --imgsz 640 320", "--imgsz 640 320", "give one number"),
    ("train --imgsz 0", "--imgsz: got '0'", "expected a whole number >= 64"),
    ("train --device 1", "--device 1: Ray assigns the devices", "--gpus-per-worker"),
    ("train --device 0 --num-workers 4", "--num-workers: is the same setting as --device 0", "give one of them"),
    ("train --device 0,1", "--device 0,1: Ray assigns the devices", "--num-workers"),
    ("train --device mps", "--device mps: Ray assigns the devices", "--num-workers"),
    ("train --num-workers -1", "--num-workers: got '-1'", "must be 0 (no Ray), a number up to 4096"),
    ("train --num-workers 8-2", "--num-workers: got '8-2'", "a range such as 2-8"),
    ("train --num-workers 5000", "--num-workers: got '5000'", "a number up to 4096"),
    ("train --num-workers two", "--num-workers: got 'two'", "a number, a range"),
    ("train --workers -2", "--workers: got '-2'", "expected a whole number >= -1"),
    ("train --workers 1000", "--workers: got '1000'", "<= 256"),
    ("train --set optimizer.lr=0.1", "unknown setting 'optimizer.lr'", "did you mean optimizer.lr0?"),
    ("train --set optimizer.lr0", "--set optimizer.lr0", "write --set PATH=VALUE, e.g. --set optimizer.lr0=0.02"),
    ("train --set optimizer.lr0=fast", "--set optimizer.lr0: got 'fast'", "expected a number"),
    ("train --set optimizer.lr0=-1", "--set optimizer.lr0: got '-1'", "expected a number >= 1e-06"),
    ("train --set optimiser.lr0=0.1", "unknown setting 'optimiser.lr0'", "did you mean optimizer.lr0?"),
    ("train --set epochs=", "--set epochs: got ''", "expected a whole number >= 1"),
    ("train --set optimizer=SGD", "--set optimizer", "optimizer.name"),
    ("train --optimizer adam", "--optimizer: optimizer.name: got 'adam'", "expected one of SGD, Adam, AdamW"),
    ("train --precision fp8", "--precision: got 'fp8'", "expected one of auto, fp32, bf16, fp16"),
    ("train --cache disc", "--cache: got 'disc'", "expected one of auto, none, ram, disk"),
    ("train --patience -1", "--patience: got '-1'", "expected a whole number >= 0"),
    ("train --seed -1", "--seed: got '-1'", "expected a whole number >= 0"),
    ("train --name a/b", "--name: got 'a/b'", "folders go into --project"),
    ("train --name -x", "--name: expected one argument", "see python -m ray_yolo.train --help"),
    ("train --fraction 2", "--fraction: got '2'", "expected a number > 0.0 and <= 1.0"),
    ("train --fraction 0", "--fraction: got '0'", "expected a number > 0.0"),
    ("train --changes '30: imgsz=320'", "--changes: got '30: imgsz=320'", "imgsz cannot change"),
    ("train --changes 'x: lr0=1'", "--changes: got 'x: lr0=1'", "e.g. '30: lr0=0.005 mosaic=0'"),
    ("train --evolve", "--evolve", "use python -m ray_yolo.tune"),
    ("train --entity me", "--entity: not supported", "see --mlflow-uri"),
    ("train --local_rank 0", "--local_rank: not needed", "run this command once with --num-workers N"),
    ("train --bucket gs://x", "--bucket", "use --storage-path s3://BUCKET"),
    ("train --resume_evolve x", "--resume_evolve", "run the same python -m ray_yolo.tune command again"),
    ("train data.yaml", "unexpected 'data.yaml'", "values follow their flags"),
    ("train lr0=0.1", "unexpected 'lr0=0.1'", "write --set lr0=0.1"),
    ("train --max-failures -2", "--max-failures: got '-2'", "expected a whole number >= -1"),
    ("train --wait-for-resources soon", "--wait-for-resources: got 'soon'", "expected a number >= 0.0"),
    ("train --stall-seconds -1", "--stall-seconds: got '-1'", "expected a number >= 0.0"),
    ("train --gpus-per-worker -1", "--gpus-per-worker: got '-1'", "expected a number >= 0 or auto"),
    ("train --cpus-per-worker 0", "--cpus-per-worker: got '0'", "expected a number > 0 and <= 4096 or auto"),
    ("val", "weights is required", "such as runs/train/exp/weights/best.pt"),
    ("val --weights BEST --conf 2", "--conf: evaluate.confidence: got '2'", "expected a number >= 0.0 and < 1.0"),
    ("val --weights BEST --imgsz 33", "--imgsz: got '33'", "expected a whole number >= 64 and multiple of 32"),
    ("val --weights BEST --augment", "--augment: not supported", "a larger --imgsz"),
    ("val --weights BEST --task validation", "--task: split: got 'validation'", "expected one of val, test, train"),
    ("predict --weights BEST", "source is required", "a folder, a file, a pattern"),
    ("predict --weights BEST --source IMAGES --conf 1.5", "--conf: confidence: got '1.5'", "< 1.0"),
    ("predict --weights BEST --source IMAGES --vid-stride 0", "--vid-stride: got '0'", ">= 1"),
    ("predict --weights BEST --source IMAGES --line-thickness 0", "--line-thickness: got '0'", ">= 1"),
    ("predict --weights BEST --source IMAGES --batch-size 0", "--batch-size: got '0'", ">= 1"),
    ("predict --weights BEST --source IMAGES --view-img", "--view-img: not supported",
     "open the pictures in the folder"),
    ("predict --weights BEST --source IMAGES --data DATA", "--data: not needed", "the weights contain the names"),
    ("export", "weights is required", "such as runs/train/exp/weights/best.pt"),
    ("export --weights BEST --format tflite", "--format: got 'tflite'", "expected one of onnx, openvino, torchscript"),
    ("export --weights BEST --opset 1", "--opset: got '1'", "expected a whole number >= 16"),
    ("export --weights BEST --half", "--half: not supported", "the program that runs the file"),
    ("export --weights BEST --simplify", "--simplify: not needed", "constants are always folded"),
    ("export --weights BEST --imgsz 65", "--imgsz: got '65'", "multiple of 32"),
    ("export --weights BEST --device 0", "--device 0", "this command runs on the CPU; omit it"),
    ("tune --data DATA --num-workers 4", "--num-workers", "use --workers-per-trial"),
    ("tune --data DATA --space good.yaml --trials 0", "--trials: got '0'", ">= 1"),
    ("tune --data DATA --space good.yaml --workers-per-trial 0", "--workers-per-trial: got '0'", ">= 1"),
    ("tune --evolve", "--evolve: not needed", "use --space evolve --trials N"),
    ("serve --weights BEST --device 0", "--device 0", "set their number with --gpus-per-replica"),
    ("serve", "weights is required", "such as runs/train/exp/weights/best.pt"),
    ("serve --weights BEST --conf 3", "--conf: confidence: got '3'", "< 1.0"),
    ("serve --weights nowhere.pt", "weights: nowhere.pt", "no such weights file"),
    ("train --hyp data/hyp.scratch-low.yaml", "hyp.scratch-low.yaml: no such file", "--recipe scratch-low has its"),
    ("train --hyp hyp.VOC.yaml", "hyp.VOC.yaml: no such file", "--recipe fine-tune has its settings"),
    ("train --config nowhere.yaml", "nowhere.yaml", "cannot be read: No such file or directory"),
    ("train --config broken.yaml", "broken.yaml:2: not YAML", "did not find expected ',' or '}'"),
    ("train --config unknown.yaml", "unknown.yaml:2: unknown setting 'optimizer.lr'", "did you mean optimizer.lr0?"),
    ("train --config code.yaml", "code.yaml:1: callbacks runs code", "give it as --callbacks"),
    ("train --hyp placed.yaml", "placed.yaml:2: num_workers is not a setting of the recipe",
     "give it as --num-workers"),
    ("train --hyp tabs.yaml", "tabs.yaml:2: not YAML", "indent with spaces, not tabs"),
]
"""Refused before anything is imported."""

DATASETS = [
    ("nowhere.yaml", "nowhere.yaml: no such file", "give the path of a data-set YAML"),
    ("shape8", "shape8: no such file", "did you mean shapes8?"),
    ("data/images", "data/images: holds no YAML file", "give the path of a data-set YAML"),
    ("empty", "empty: holds no YAML file", "give the path of a data-set YAML"),
    ("two", "two: holds several YAML files (a.yaml, b.yaml)", "give the path of one"),
    ("text.txt", "text.txt: is a text file", "write a YAML file with `train: text.txt`"),
    ("photo.pt", "photo.pt: is a file of weights", "give it with --weights photo.pt"),
    ("photo.jpg", "photo.jpg:1: not UTF-8", "give a YAML file"),
    ("set.zip", "set.zip: is an archive", "unpack it, and give its folder or the YAML file in it"),
    ("coco.json", "coco.json: is a JSON file", "`val: {annotations: coco.json, images: FOLDER}`"),
    ("obj.data", "obj.data: is Darknet's description, not YAML", "`val: data/val.txt`, `names: [\"cat\", \"dog\"]`"),
    ("valid.yaml", "valid.yaml:3: valid: is not read", "write `val:` instead"),
    ("capital.yaml", "capital.yaml:2: Train: is not read", "write `train:` instead"),
    ("classes.yaml", "classes.yaml:4: classes: is not read", "write `names:` instead"),
    ("windows.yaml", "windows.yaml:2: train: 'images\\\\train' does not exist", "write 'images/train', which exists"),
    ("drive.yaml", "drive.yaml:2: train: 'images/train' does not exist", "`\\` does not separate folders"),
    ("escape.yaml", "escape.yaml:2: train: 'images\\train' does not exist", "starts an escape: write 'images/train'"),
    ("escaped.yaml", "escaped.yaml:2: not YAML: found unknown escape character", "use single quotes"),
    ("zipped.yaml", "zipped.yaml:2: train: 'set.zip' is an archive", "unpack it"),
    ("list.yaml", "list.yaml:1", "the file must consist of `key: value` lines"),
    ("tabs.yaml", "tabs.yaml:2: not YAML", "indent with spaces, not tabs"),
    ("no_train.yaml", "no_train.yaml: there is no `train` split", "add a line such as `train: images/train`"),
    ("no_names.yaml", "no_names.yaml:1: names", "must list the classes, such as `names: [cat, dog]`"),
    ("wrong_count.yaml", "wrong_count.yaml:4: nc is 3, but names has 2 entries", "make them agree or drop nc"),
    ("no_folder.yaml", "no_folder.yaml:2: train: 'images/trian' does not exist", "correct the entry or `path`"),
    ("empty_folder.yaml", "empty_folder.yaml: train: no images in", "correct the path"),
    ("pixels.yaml", "pixels/labels/train/0.txt:1: has values outside 0 to 1", "must be shares of the image's width"),
    ("class_9.yaml", "class_9/labels/train/0.txt:1: has the class 9", "correct it or add the name"),
    ("from_one.yaml", "the classes of the labels seem to count from 1", "subtract 1 from each class"),
    ("no_labels.yaml", "no_labels.yaml: train: none of its 4 images has a box",
     "correct the paths, or add --allow-empty"),
    ("no_pictures.yaml", "no_pictures.yaml: train: none of its images can be used", "is not an image that can be read"),
    ("broken_coco.yaml", "coco.json: is not a JSON file", "write or download it again"),
    ("http://example.com/data.yaml", "data: http://example.com", "give a folder, or an address with s3://"),
    ("az://bucket/data.yaml", "data: az://bucket: there are no credentials", "set AZURE_STORAGE_ACCOUNT_NAME and"),
]

FILES = [
    *((f"train --data {path}", what, advice) for path, what, advice in DATASETS),
    ("train --data DATA --model yolov5q", "model: 'yolov5q' is unknown", "did you mean yolov5"),
    ("train --data DATA --model yolov11n", "model: 'yolov11n' is unknown", "did you mean yolo11n?"),
    ("train --data DATA --model yolov5s.pt", "model: yolov5s.pt is a file of weights",
     "--weights yolov5s.pt --model yolov5s"),
    ("train --data DATA --model BEST", "model: w/run/weights/best.pt is a file of weights", "give it with --weights"),
    ("train --data DATA --model nowhere.yaml", "nowhere.yaml", "cannot be read: No such file or directory"),
    ("train --data DATA --weights nowhere.pt", "nowhere.pt: no such weights file", "give a .pt file of a run"),
    ("train --data DATA --weights page.pt", "page.pt: is a page of HTML or XML", "download it again"),
    ("train --data DATA --weights photo.pt", "photo.pt: is a JPEG picture", "download it again"),
    ("train --data DATA --weights empty.pt", "empty.pt: was not written by torch.save", "download it again"),
    ("train --data DATA --weights yolov3.weights", "yolov3.weights: is Darknet's file of weights", "give the .pt file"),
    ("val --weights best.onnx", "best.onnx: is an exported ONNX model", "give best.pt"),
    ("predict --weights best.onnx --source IMAGES", "best.onnx: cannot be opened", "export it again"),
    ("predict --weights last.engine --source IMAGES", "last.engine: is a TensorRT engine", "give the .pt file"),
    ("serve --weights best.onnx", "best.onnx: is an exported ONNX model", "give best.pt"),
    ("train --data DATA --weights text.txt", "text.txt: was not written by torch.save", "download it again"),
    ("train --data DATA --weights archive.pt", "archive.pt: not a readable weights file", "download it again"),
    ("train --data DATA --weights torn.pt", "torn.pt: not a readable weights file", "download it again"),
    ("train --data DATA --weights data", "data: is a folder without weights/best.pt", "give the folder of a run"),
    ("train --data DATA --classes 9", "classes: 9 is none of the classes", "0 dark, 1 bright"),
    ("train --data DATA --freeze 99", "freeze: there is no layer", "has layers 0 to"),
    ("train --data DATA --callbacks nowhere.py", "callbacks: nowhere.py: cannot be imported",
     "give package.module:object"),
    ("train --data DATA --callbacks none.py", "callbacks: none.py: has no function named",
     "on_epoch_end or on_run_end"),
    ("train --data DATA --microbatch 5", "microbatch: 5 does not divide batch size 16", "legal: 1, 2, 4, 8, 16"),
    ("train --data DATA --resume nowhere", "resume: nowhere is neither a run folder nor inside one", "run.json"),
    ("train --data DATA --resume auto", "resume: no unfinished run under", "name a run folder or a checkpoint"),
    ("train --data DATA --storage-path ftp://host/runs", "storage_path: ftp://host", "an address with s3://"),
    ("train --data DATA --storage-path az://bucket/runs", "there are no credentials for az://bucket",
     "set AZURE_STORAGE_"),
    ("train --data DATA --storage-path file://runs", "file://runs/runs/train is not absolute", "write file:///folder"),
    ("train --data DATA --storage-path /proc/runs", "/proc: No such file or directory",
     "give a --project and --storage-path"),
    ("train --data DATA --project text.txt", "text.txt: Not a directory", "give a --project and --storage-path"),
    ("val --weights page.pt", "page.pt: is a page of HTML or XML", "download it again"),
    ("val --weights BEST --data DATA --split test", "data/data.yaml: there is no `test` split", "add a line such as"),
    ("val --weights BEST --data DATA --classes 9", "classes: 9 is none of the classes", "0 dark, 1 bright"),
    ("predict --weights nowhere.pt --source IMAGES", "nowhere.pt: no such weights file", "give a .pt file of a run"),
    ("predict --weights BEST --source nowhere", "source: nowhere: no such file or folder", ""),
    ("predict --weights BEST --source 'nothing/*.jpg'", "source: nothing/*.jpg: no file matches this pattern", ""),
    ("predict --weights BEST --source empty", "source: no images and no videos in empty", "looked for .3gp"),
    ("predict --weights BEST --source missing.txt", "source: missing.txt:1: there is no file 'nowhere/a.jpg'",
     "looked for"),
    ("predict --weights BEST --source IMAGES --classes 9", "classes: 9 is none of the classes", "0 dark, 1 bright"),
    ("serve --weights page.pt", "page.pt: is a page of HTML or XML", "download it again"),
    ("serve --weights BEST --classes 9", "classes: 9 is none of the classes", "0 dark, 1 bright"),
    ("train --data DATA --classes bright", "--classes: got 'bright': 'bright' is no number", "the number of its place"),
    ("verify nowhere", "nowhere: no such file or folder", "give the folder of a run"),
    ("verify empty", "empty", "give the folder of a run"),
    ("verify w/run nowhere", "nowhere: is not a run folder", "give the folders of two runs"),
    ("status nowhere", "nowhere: has no events.jsonl", "give the folder of a run"),
    ("status text.txt", "text.txt: has no events.jsonl", "give the folder of a run"),
    ("status az://bucket/runs/exp", "there are no credentials for az://bucket", "set AZURE_STORAGE_ACCOUNT_NAME and"),
    ("sync nowhere --mlflow-uri sqlite:///x.db", "nowhere: no event log of a training", "give a run"),
]

SLOW = [  # their imports take seconds
    ("export --weights nowhere.pt", "nowhere.pt: no such weights file", "give a .pt file of a run"),
    ("export --weights page.pt", "page.pt: is a page of HTML or XML", "download it again"),
    ("tune --data DATA --space nowhere.yaml", "space: nowhere.yaml: no such file", "quick"),
    ("tune --data DATA --space evolv", "space: evolv: no such file", "evolve"),
    ("tune --data DATA --space bad_key.yaml", "bad_key.yaml:1: unknown setting 'lr'", "did you mean optimizer.lr0?"),
    ("tune --data DATA --space reversed.yaml", "reversed.yaml:1", "0.1"),
    ("tune --data DATA --space good.yaml --warm-start nowhere.csv", "nowhere.csv: cannot be read", "No such file"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with mistakes, and without."""
    folder = tmp_path_factory.mktemp("here")
    make_dataset(folder / "data")
    make_weights(folder / "w")
    (folder / "tiny.yaml").write_text(json.dumps(TINY))
    write_image(folder / "photo.jpg", smooth_picture(48, 64))
    shutil.copy(folder / "photo.jpg", folder / "photo.pt")
    with zipfile.ZipFile(folder / "archive.pt", "w") as archive:
        archive.writestr("images/a.jpg", "x")
    whole = (folder / KNOWN["BEST"]).read_bytes()
    (folder / "torn.pt").write_bytes(whole[:len(whole) // 2])
    for name in ("empty", "two"):
        (folder / name).mkdir()
    splits = "train: images/train\nval: images/val\n"
    for name, text in {
            "text.txt": "hello\n", "empty.pt": "", "page.pt": "<!DOCTYPE html><html>Sign in</html>",
            "broken.yaml": "optimizer: {lr0: 0.1\n", "unknown.yaml": "optimizer:\n  lr: 0.1\n",
            "code.yaml": "callbacks: mine.py\n", "placed.yaml": "lr0: 0.1\nnum_workers: 4\n", "none.py": "x = 1\n",
            "list.yaml": "- a\n- b\n", "tabs.yaml": "train: images\n\tval: x\n", "missing.txt": "nowhere/a.jpg\n",
            "no_train.yaml": "path: data\nval: images/val\nnames: [a, b]\n", "no_names.yaml": f"path: data\n{splits}",
            "wrong_count.yaml": f"path: data\n{splits}nc: 3\nnames: [a, b]\n",
            "no_folder.yaml": "path: data\ntrain: images/trian\nval: images/val\nnames: [a, b]\n",
            "empty_folder.yaml": "path: .\ntrain: empty\nval: empty\nnames: [a, b]\n",
            "two/a.yaml": splits, "two/b.yaml": splits, "coco.json": '{"images": [',
            "broken_coco.yaml": "train: coco.json\nval: coco.json\nnames: [a, b]\n",
            "set.zip": "PK", "obj.names": "cat\ndog\n",
            "obj.data": "classes= 2\ntrain  = data/train.txt\nvalid = data/val.txt\nnames = obj.names\nbackup = b/\n",
            "valid.yaml": "path: data\ntrain: images/train\nvalid: images/val\nnames: [a, b]\n",
            "capital.yaml": "path: data\nTrain: images/train\nval: images/val\nnames: [a, b]\n",
            "classes.yaml": f"path: data\n{splits}classes: [a, b]\n",
            "windows.yaml": "path: data\ntrain: images\\train\nval: images/val\nnames: [a, b]\n",
            "drive.yaml": f"path: C:\\sets\n{splits}names: [a, b]\n",
            "escape.yaml": 'path: data\ntrain: "images\\train"\nval: images/val\nnames: [a, b]\n',
            "escaped.yaml": 'path: data\ntrain: "images\\qtrain"\nval: images/val\nnames: [a, b]\n',
            "zipped.yaml": "path: .\ntrain: set.zip\nval: data/images/val\nnames: [a, b]\n",
            "best.onnx": "onnx", "best.pt": "", "last.engine": "engine", "yolov3.weights": "darknet",
            "three.yaml": f"path: data\n{splits}names: [x, y, z]\n", "good.yaml": "lr0: [0.001, 0.1]\n",
            "bad_key.yaml": "lr: [0.001, 0.1]\n", "reversed.yaml": "lr0: [0.1, 0.001]\n"}.items():
        (folder / name).write_text(text)
    for name, label in (("pixels", "0 320 240 100 100"), ("class_9", "9 0.5 0.5 0.2 0.2"),
                        ("from_one", "1 0.5 0.5 0.2 0.2\n2 0.4 0.4 0.2 0.2"), ("no_labels", ""),
                        ("no_pictures", "0 0.5 0.5 0.2 0.2")):
        for split in ("train", "val"):
            for number in range(4):
                image = folder / name / "images" / split / f"{number}.jpg"
                write_image(image, smooth_picture(48, 64 + number))
                if name == "no_pictures":
                    image.write_text("not a picture")
                (text := folder / name / "labels" / split / f"{number}.txt").parent.mkdir(parents=True, exist_ok=True)
                if label:
                    text.write_text(f"{label}\n")
        (folder / f"{name}.yaml").write_text(f"path: {name}\n{splits}names: [a, b]\n")
    return folder


Check = Callable[[str, str, str], None]


@pytest.fixture
def check(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run a command line, which must be refused with one line that has both texts."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAY_YOLO_CACHE", str(folder / "cache"))
    for name in ("RAY_ADDRESS", "AZURE_STORAGE_ACCOUNT_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    before = sorted(folder.rglob("*"))

    def refused(line: str, what: str, advice: str) -> None:
        command, *words = (KNOWN.get(word, word) for word in shlex.split(line))
        capsys.readouterr()
        status = run(lambda: getattr(cli, command)(words))
        said, error = capsys.readouterr()
        assert (status, said) == (2, "")
        assert len(error.splitlines()) == 1
        assert what in error
        assert advice in error
        made = [path for path in sorted(folder.rglob("*"))
                if path not in before and {"cache", "__pycache__"}.isdisjoint(path.parts)]
        assert made == []

    return refused


@pytest.mark.parametrize(("line", "what", "advice"), WORDS)
def test_a_mistake_in_words(check: Check, line: str, what: str, advice: str) -> None:
    check(line, what, advice)


@pytest.mark.parametrize(("line", "what", "advice"), FILES)
def test_a_mistake_in_files(check: Check, line: str, what: str, advice: str) -> None:
    check(line, what, advice)


@pytest.mark.parametrize(("line", "what", "advice"), SLOW)
def test_a_mistake_that_takes_imports_to_see(check: Check, line: str, what: str, advice: str) -> None:
    check(line, what, advice)


def test_weights_of_other_classes_are_refused_with_both_lists(
        folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAY_YOLO_CACHE", str(folder / "cache"))
    status = run(lambda: cli.val(["--weights", KNOWN["BEST"], "--data", "three.yaml"]))
    lines = capsys.readouterr().err.splitlines()
    assert status == 2
    assert lines[0].startswith(f"DatasetError: three.yaml: has 3 classes, but {KNOWN['BEST']} has 2")
    assert [line.split() for line in lines[2:5]] == [["0", "x", "dark"], ["1", "y", "bright"], ["2", "z", "-"]]


def test_a_command_that_does_not_exist_names_those_that_do(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ray_yolo", "trian"])
    assert cli.console() == 2
    assert capsys.readouterr().err.startswith("InputError: trian: no such command; the commands are train, val, ")


def test_the_table_has_at_least_the_mistakes_that_were_tried_by_hand() -> None:
    lines = [line for line, *_ in (*WORDS, *FILES, *SLOW)]
    assert len(set(lines)) == len(lines) >= 120
