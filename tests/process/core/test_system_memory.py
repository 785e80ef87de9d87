"""Freed memory stays with the process: seen from outside, in a process of its own, by its page faults."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from ray_yolo.core.system import keep_freed_memory
if {keeps}:
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(50_000_000, np.uint8)  # above 32 MB, where glibc's own threshold stops to adapt
before = faults()
for _ in range(20):
    np.ones(50_000_000, np.uint8)
print(faults() - before)
"""


def page_faults(*, keeps: bool) -> int:
    return int(subprocess.run([sys.executable, "-c", PROGRAM.format(keeps=keeps)], capture_output=True, text=True,
                              check=True, env={"GLIBC_TUNABLES": "", "NUMPY_MADVISE_HUGEPAGE": "0"}).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_blocks_that_were_freed_are_used_again_without_page_faults() -> None:
    assert page_faults(keeps=True) < 1_000 < page_faults(keeps=False)
