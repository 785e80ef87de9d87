"""Files that are replaced in one moment, and digests of what is written."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from ray_yolo.core.files import atomic_write


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a.txt", "old")
    subprocess.run([sys.executable, "-c", textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from ray_yolo.core.files import replacing
        with replacing(Path(sys.argv[1])) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
        """), str(tmp_path / "a.txt")], check=False)
    assert (tmp_path / "a.txt").read_text() == "old"
    [left] = [path.name for path in tmp_path.iterdir() if path.name != "a.txt"]
    assert (left[0], left[-4:]) == (".", ".txt")
