"""Suppression against an obvious loop, and the rules of selection by hand."""

import subprocess
import sys

WITHOUT_LIBRARY = """
import sys
from pathlib import Path
Path.glob = lambda *_, **__: iter([])  # the library is not where it is looked for
import torch
from ray_yolo.ops.nms import select
box = torch.tensor([[[0.0, 0.0, 9.0, 9.0], [1.0, 0.0, 9.0, 9.0]]])
print(len(select(box, torch.tensor([[[0.9], [0.8]]]), confidence=0.1, iou=0.5, max_detections=9, multi_label=False)[0]))
"""


def test_where_torchvisions_library_is_not_found_the_package_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
