"""Small videos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np


def write_video(path: Path, frames: Sequence[np.ndarray], rate: float = 10.0) -> Path:
    """Write RGB frames (height, width, 3) of one size as Motion JPEG, which keeps them nearly as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = frames[0].shape[:2]
    video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), rate, (width, height))
    assert video.isOpened()
    for frame in frames:
        video.write(frame[..., ::-1])
    video.release()
    return path
