"""A peer's bare training of yolov5n through its own public interface; run by `commands.py` with the peers' Python.

    python peer_train.py {ultralytics,yolov5} DATA.yaml IMGSZ BATCH EPOCHS FOLDER

Appends a line to FOLDER/marks after each `step` and each `epoch` with its validation. What is not given is the peer's
own default, but that it draws nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import matplotlib


def train_ultralytics(data: str, imgsz: int, batch: int, epochs: int, folder: Path) -> None:
    from ultralytics import YOLO

    model = YOLO("yolov5n.yaml")
    model.add_callback("on_train_batch_end", lambda _: mark(folder, "step"))
    model.add_callback("on_fit_epoch_end", lambda _: mark(folder, "epoch"))
    model.train(data=data, imgsz=imgsz, batch=batch, epochs=epochs, device="cpu", pretrained=False, project=str(folder),
                plots=False)


def train_yolov5(data: str, imgsz: int, batch: int, epochs: int, folder: Path) -> None:
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # it reads its own pickled checkpoint at the end
    os.environ["YOLOV5_CONFIG_DIR"] = str(folder)  # where it looks for a font before it loads one
    shutil.copy(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), folder / "Arial.ttf")
    from yolov5 import train
    from yolov5.utils.callbacks import Callbacks

    options = train.parse_opt(known=True)
    given = {"data": data, "weights": "", "cfg": "yolov5n.yaml", "imgsz": imgsz, "batch_size": batch, "epochs": epochs,
             "device": "cpu", "project": str(folder), "noplots": True}
    for name, value in given.items():
        setattr(options, name, value)
    callbacks = Callbacks()
    callbacks.register_action("on_train_batch_end", callback=lambda *_, **__: mark(folder, "step"))
    callbacks.register_action("on_fit_epoch_end", callback=lambda *_, **__: mark(folder, "epoch"))
    train.main(options, callbacks)


def mark(folder: Path, kind: str) -> None:
    with (folder / "marks").open("a") as file:
        print(kind, file=file)


if __name__ == "__main__":
    peer, data, *numbers, folder = sys.argv[1:]
    sys.argv = sys.argv[:1]
    {"ultralytics": train_ultralytics, "yolov5": train_yolov5}[peer](data, *map(int, numbers), Path(folder))
