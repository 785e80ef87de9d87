"""Trains a peer's yolov5n through the peer's own public interface and prints the seconds of each epoch as JSON.

Run by `tests/benchmarks/peers.py` with the Python of an environment in which the peer is installed; the product never
imports a peer, and this file imports nothing of the product.

    python peer_train.py {ultralytics,yolov5} DATA.yaml IMGSZ BATCH EPOCHS THREADS FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time

began: list[float] = []
ended: list[float] = []


def note_start(*_: object, **__: object) -> None:
    began.append(time.perf_counter())


def note_end(*_: object, **__: object) -> None:
    ended.append(time.perf_counter())


def train_ultralytics(data: str, imgsz: int, batch: int, epochs: int, threads: int, folder: str) -> None:
    import torch
    from ultralytics import YOLO

    def use_all_threads(_: object) -> None:  # it takes one less than there are cores
        torch.set_num_threads(threads)

    model = YOLO("yolov5n.yaml")
    model.add_callback("on_train_start", use_all_threads)
    model.add_callback("on_train_epoch_start", note_start)
    model.add_callback("on_train_epoch_end", note_end)
    model.train(data=data, imgsz=imgsz, batch=batch, epochs=epochs, device="cpu", cache="ram", val=False, plots=False,
                pretrained=False, project=folder, verbose=False)


def train_yolov5(data: str, imgsz: int, batch: int, epochs: int, threads: int, folder: str) -> None:
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # it reads its own pickled checkpoint at the end
    import torch
    from yolov5 import train
    from yolov5.utils.callbacks import Callbacks

    torch.set_num_threads(threads)
    options = train.parse_opt(known=True)
    given = {"data": data, "weights": "", "cfg": "yolov5n.yaml", "imgsz": imgsz, "batch_size": batch, "epochs": epochs,
             "device": "cpu", "cache": "ram", "workers": 0, "project": folder, "noplots": True, "nosave": True}
    for name, value in given.items():
        setattr(options, name, value)
    callbacks = Callbacks()
    callbacks.register_action("on_train_epoch_start", callback=note_start)
    callbacks.register_action("on_train_epoch_end", callback=note_end)
    train.main(options, callbacks)


if __name__ == "__main__":
    peer, data, *numbers, folder = sys.argv[1:]
    sys.argv = sys.argv[:1]
    {"ultralytics": train_ultralytics, "yolov5": train_yolov5}[peer](data, *map(int, numbers), folder)
    print(json.dumps([end - start for start, end in zip(began, ended, strict=True)]))
