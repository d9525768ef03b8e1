"""Bytes to lines, with a longest line."""

import asyncio
import os

import pytest

from mlx_isolate_supervisor.engines.pipes import (
    FINAL_LINES_MAX,
    LineSplitter,
    Overlong,
    PipeReader,
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_lines_do_not_depend_on_how_bytes_arrive(size: int) -> None:
    data = b"one\ntwo\n\nthree\nrest"
    splitter = LineSplitter(100, "drop")
    lines: list[bytes] = []
    for at in range(0, len(data), size):
        lines += splitter.feed(data[at : at + size])
    assert lines + splitter.finish() == [b"one", b"two", b"", b"three", b"rest"]
    assert splitter.dropped == 0


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
def test_an_overlong_line_is_dropped_once_and_the_next_is_whole(size: int) -> None:
    data = b"a\n" + b"x" * 50 + b"\nb\n" + b"y" * 11 + b"\nc\n"
    splitter = LineSplitter(10, "drop")
    lines: list[bytes] = []
    for at in range(0, len(data), size):
        lines += splitter.feed(data[at : at + size])
    assert lines == [b"a", b"b", b"c"]
    assert splitter.dropped == 2


@pytest.mark.parametrize("size", [1, 3, 4, 8, 100])
def test_an_overlong_line_is_cut_where_nothing_may_be_lost(size: int) -> None:
    data = b"abcdefghijkl\nmnop\nqrstu"
    splitter = LineSplitter(4, "cut")
    lines: list[bytes] = []
    for at in range(0, len(data), size):
        lines += splitter.feed(data[at : at + size])
    assert lines + splitter.finish() == [b"abcd", b"efgh", b"ijkl", b"mnop", b"qrst", b"u"]


@pytest.mark.parametrize("overlong", ["drop", "cut"])
def test_memory_stays_bounded(overlong: Overlong) -> None:
    splitter = LineSplitter(10, overlong)
    for _ in range(1000):
        splitter.feed(b"z" * 1000)
    assert sum(map(len, splitter.finish())) <= 10


def test_time_for_a_line_grows_with_its_length_and_not_its_square() -> None:
    # Copied whole with each piece, it would take a minute.
    splitter = LineSplitter(16 << 20, "drop")
    for _ in range(16_000):
        splitter.feed(b"x" * 512)
    assert list(map(len, splitter.feed(b"\n"))) == [16_000 * 512]


def test_of_a_dead_childs_flood_the_last_lines_are_handed_on() -> None:
    """Each costs its reader as much as any line, and all of them come in one turn of the loop."""
    got: list[bytes] = []

    async def read() -> None:
        near, far = os.pipe()
        reader = PipeReader(
            near, LineSplitter(100, "cut"), on_lines=got.extend, on_end=lambda: None
        )
        os.write(far, b"\n" * 60_000 + b"last words")
        os.close(far)
        reader.close()

    asyncio.run(read())
    assert len(got) == FINAL_LINES_MAX
    assert got[-1] == b"last words"
