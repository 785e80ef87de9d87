"""What happened to the workers of a sweep, in its folder."""

from __future__ import annotations

import re
from pathlib import Path

from ray_yolo.tune.pool_log import POOL_LOG_FILE, last_pool_lines, log_pool


def test_each_event_is_a_line_with_its_time_and_the_newest_are_read(tmp_path: Path) -> None:
    assert last_pool_lines(tmp_path, 3) == []
    for number in range(5):
        log_pool(tmp_path, f"worker place {number} is given to\nanother program")
    lines = (tmp_path / POOL_LOG_FILE).read_text().splitlines()
    assert len(lines) == 5  # a line end in a text makes no second line
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  worker place \d", line) for line in lines)
    assert last_pool_lines(tmp_path, 2) == lines[3:]


def test_a_folder_that_is_gone_loses_the_line_only(tmp_path: Path) -> None:
    log_pool(tmp_path / "gone", "worker 3 is lost")
    assert last_pool_lines(tmp_path / "gone", 3) == []
