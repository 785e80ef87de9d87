"""Kernels of Triton on a CPU, by its interpreter."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch


@contextmanager
def interpreted(name: str, *others: str) -> Iterator[ModuleType]:
    """Context with a module whose kernels the interpreter runs, and those of other modules that they call.

    Triton decides about that where a kernel is defined. So do its own functions, which may have been imported before.
    A call of one kernel's function by another leaves changes in Triton's modules, which are undone.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    before = [dict(vars(place)) for place in places]
    compiled = {each: sys.modules.pop(each, None) for each in (name, *others)}
    try:
        for own, function in before[0].items():
            if isinstance(function, JITFunction):
                setattr(tl, own, InterpretedFunction(function.fn))
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            yield importlib.import_module(name)
    finally:
        for each, module in compiled.items():  # no other module that was imported meanwhile is forgotten
            package, _, own = each.rpartition(".")
            sys.modules.pop(each, None)
            vars(sys.modules[package]).pop(own, None)
            if module:
                sys.modules[each] = module
                setattr(sys.modules[package], own, module)
        for place, values in zip(places, before, strict=True):
            for own, value in values.items():
                if vars(place)[own] is not value:
                    setattr(place, own, value)
