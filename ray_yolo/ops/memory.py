"""How this process handles the memory that it frees."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> None:
    """Have large blocks of memory reused instead of returned to the system after each layer and each picture.

    A page that comes back costs a page fault, a dear one in a virtual machine: a fifth of a training step on a CPU and
    more than half of decoding were measured. Nothing happens where the C library is not glibc.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, num_bytes in ((-1, 2**31 - 1), (-2, 2**28), (-3, 2**30)):  # glibc's M_TRIM_THRESHOLD, M_TOP_PAD,
            set_option(option, num_bytes)  # M_MMAP_THRESHOLD
