"""Following the frames of a WebSocket by their lengths alone."""

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_isolate_supervisor.relay.frames import FAILED, FrameTracker, close_frame
from tests.fakes.fake_websocket import BINARY, CLOSE, PING, frame


def masked(opcode: int, payload: bytes) -> bytes:
    """A frame with a mask (of zeros)."""
    whole = frame(opcode, payload)
    head = len(whole) - len(payload)
    return bytes((whole[0], whole[1] | 0x80)) + whole[2:head] + bytes(4) + payload


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from((0, 1, 125, 126, 127, 1000, 65535, 65536)), max_size=6),
    is_masked=st.booleans(),
    data=st.data(),
)
def test_any_split_finds_the_same_boundaries(
    sizes: list[int], is_masked: bool, data: st.DataObject
) -> None:
    make = masked if is_masked else frame
    frames = [make(BINARY, b"\x88" * size) for size in sizes]
    stream = b"".join(frames)
    ends = {0}
    for one in frames:
        ends.add(max(ends) + len(one))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    tracker, position = FrameTracker(), 0
    for cut in sorted({*cuts, *ends, len(stream)}):
        tracker.feed(stream[position:cut])
        position = cut
        assert tracker.is_at_boundary is (cut in ends)
    assert tracker.frames == len(frames)
    assert not tracker.is_closed


def test_a_close_frame_is_noticed() -> None:
    tracker = FrameTracker()
    tracker.feed(frame(PING, b"x") + frame(CLOSE, struct.pack(">H", 1000)))
    assert tracker.is_closed and tracker.is_at_boundary


def test_a_close_frame_is_whole_and_its_reason_fits() -> None:
    made = close_frame(FAILED, "ä" * 100)
    tracker = FrameTracker()
    tracker.feed(made)
    assert tracker.is_closed and tracker.is_at_boundary
    assert len(made) <= 2 + 125
    assert made[4:].decode() == "ä" * 61
    assert struct.unpack(">H", made[2:4]) == (FAILED,)
