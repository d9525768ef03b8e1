"""Gives memory back that this process has and does not use: MLX's freed buffers and malloc's pages."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx


def give_back() -> None:
    """Give back what nobody uses; for a moment of rest, since what comes next asks for it anew."""
    mx.clear_cache()
    if _trim is not None:
        _trim(0)


def _find_trim() -> Callable[[int], Any] | None:
    """glibc's: it keeps what was freed below something that was not, however much it is."""
    if sys.platform != "linux":
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
    return trim


_trim = _find_trim()
