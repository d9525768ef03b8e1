"""What `give_back` gives back: MLX's freed buffers, and pages that malloc keeps below used ones."""

import ctypes
import sys

import mlx.core as mx
import psutil
import pytest

from mlx_isolate_engine.unused_memory import give_back

BLOCKS, BLOCK_BYTES = 4000, 16 << 10


def test_freed_buffers_are_given_back_and_used_ones_are_not() -> None:
    kept = mx.ones((1 << 20,))
    freed = mx.ones((1 << 20,))
    mx.eval(kept, freed)
    del freed
    active = mx.get_active_memory()
    assert mx.get_cache_memory() > 0
    give_back()
    assert mx.get_cache_memory() == 0
    assert mx.get_active_memory() == active
    assert kept.sum().item() == 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_pages_below_a_used_block_are_given_back() -> None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        pytest.skip("a C library without malloc_trim")
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:
        library.free(block)
    process = psutil.Process()
    before = process.memory_info().rss
    give_back()
    assert before - process.memory_info().rss >= BLOCKS * BLOCK_BYTES // 2
    library.free(blocks[-1])
