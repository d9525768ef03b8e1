"""The parser of an engine's answer: every split of right bytes, and many kinds of wrong ones."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_isolate_supervisor.relay import framing
from mlx_isolate_supervisor.relay.answer_head import parse_head
from mlx_isolate_supervisor.relay.framing import (
    ChunkedBody,
    FramingError,
    SizedBody,
    chunk_length,
    frame,
    unframe,
)

EVENTS = [b"data: a\n\n", b": keepalive 1/2\n\n", b"event: x\r\ndata: b\r\n\r\n", b"data: c\r\r"]
WIRE = b"".join(frame(event) for event in EVENTS)
END = b"0\r\n\r\n"


def feed_all(body: ChunkedBody | SizedBody, pieces: list[bytes]) -> list[bytes]:
    return [body.feed(piece) for piece in pieces if not body.has_ended]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds) if a < b]


def test_every_split_in_two_gives_the_same_whole_events() -> None:
    data = WIRE + END
    boundaries = {0}
    for event in EVENTS:
        boundaries.add(max(boundaries) + len(frame(event)))
    for cut in range(1, len(data)):
        body = ChunkedBody(whole_events=True)
        first = body.feed(data[:cut])
        assert first == data[: max(b for b in boundaries if b <= cut)]
        assert first + body.feed(data[cut:]) == WIRE
        assert body.has_ended and body.chunks == len(EVENTS) and body.surplus == b""


def test_byte_by_byte_hands_out_each_event_at_its_last_byte() -> None:
    body = ChunkedBody(whole_events=True)
    blocks = [body.feed(WIRE[i : i + 1]) for i in range(len(WIRE))]
    assert [block for block in blocks if block] == [frame(event) for event in EVENTS]


@settings(deadline=None)
@given(
    payloads=st.lists(st.binary(min_size=1, max_size=60), max_size=8),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
    surplus=st.sampled_from([b"", b"HTTP/1.1"]),
)
def test_any_split_of_any_chunks_is_passed_unchanged(
    payloads: list[bytes], cuts: list[int], surplus: bytes
) -> None:
    wire = b"".join(frame(payload) for payload in payloads)
    body = ChunkedBody(whole_events=False)
    blocks = feed_all(body, split(wire + END, cuts))
    if surplus and body.has_ended:
        body = ChunkedBody(whole_events=False)
        blocks = [body.feed(wire + END + surplus)]
        assert body.surplus == surplus
    assert b"".join(blocks) == wire
    assert body.has_ended and body.chunks == len(payloads)
    assert unframe(wire) == b"".join(payloads)
    position = 0
    for block in blocks:
        unframe(block)  # whole chunks only
        position += len(block)


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.sampled_from([b"\n", b"\r", b"x", b"\n\n", b"data: y"]), max_size=30),
    chunk_cuts=st.lists(st.integers(0, 200), max_size=20),
    wire_cuts=st.lists(st.integers(0, 2000), max_size=12),
)
def test_events_cut_over_chunks_go_on_at_an_event_end_only(
    text: list[bytes], chunk_cuts: list[int], wire_cuts: list[int]
) -> None:
    payload = b"".join(text)
    wire = b"".join(frame(piece) for piece in split(payload, chunk_cuts))
    body = ChunkedBody(whole_events=True)
    sent = b""
    for piece in split(wire, wire_cuts):
        sent += body.feed(piece)
        passed = unframe(sent)
        assert passed == payload[: len(passed)]
        assert passed == b"" or passed.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))
    sent += body.feed(END)
    assert sent == wire and body.has_ended


def test_an_event_whose_end_is_a_chunk_of_its_own_is_not_delayed() -> None:
    body = ChunkedBody(whole_events=True)
    assert body.feed(frame(b"data: a\n")) == b""
    assert body.feed(frame(b"\n")) == frame(b"data: a\n") + frame(b"\n")


def test_the_end_of_a_size_line_is_no_end_of_an_event() -> None:
    body = ChunkedBody(whole_events=True)
    assert body.feed(b"1\r\n\n\r\n") == b""


def test_one_event_in_one_piece_is_not_copied() -> None:
    piece = frame(b"data: x\n\n")
    assert ChunkedBody(whole_events=True).feed(piece) is piece


def test_what_was_held_goes_on_at_a_clean_end() -> None:
    body = ChunkedBody(whole_events=True)
    assert body.feed(frame(b"data: unfinished")) == b""
    assert body.feed(END) == frame(b"data: unfinished")


def test_trailers_are_read_and_dropped() -> None:
    for cut in range(1, 30):
        data = frame(b"x") + b"0\r\nX-Sum: 1\r\nY: 2\r\n\r\nrest"
        body = ChunkedBody(whole_events=False)
        got = b"".join(feed_all(body, [data[:cut], data[cut:]]))
        assert got == frame(b"x") and body.has_ended
        assert b"rest".startswith(body.surplus)


def test_leading_zeros_and_capitals_are_a_size() -> None:
    assert chunk_length(b"000A") == 10
    body = ChunkedBody(whole_events=False)
    assert body.feed(b"00a\r\n0123456789\r\n000\r\n\r\n") == b"00a\r\n0123456789\r\n"
    assert body.has_ended


@pytest.mark.parametrize(
    "line", [b"", b"-5", b"+5", b" 5", b"5 ", b"0x10", b"0X1", b"1_0", b"5;ext=1", b"g", b"\xb2"]
)
def test_a_size_that_is_no_number_is_refused(line: bytes) -> None:
    with pytest.raises(FramingError):
        chunk_length(line)
    with pytest.raises(FramingError):
        ChunkedBody(whole_events=True).feed(line + b"\r\n" + b"x" * 40)


@pytest.mark.parametrize(
    "data",
    [
        b"f" * 17 + b"\r\n",
        b"ffffffffffffffff\r\n",
        b"1000001\r\n",
        b"1" * 40,
        b"3\r\nabcd\r\n",
        b"3\r\nabc\n\n",
        b"3\r\nabc\r\n" + b"z" * 30,
        b"0\r\nX: " + b"y" * 9000,
    ],
)
def test_hostile_chunks_are_refused_at_once(data: bytes) -> None:
    with pytest.raises(FramingError):
        ChunkedBody(whole_events=True).feed(data)


def test_an_endless_event_is_refused_at_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "ANSWER_HELD_BYTES_MAX", 10_000)  # the real bound takes seconds
    body = ChunkedBody(whole_events=True)
    with pytest.raises(FramingError):
        for _ in range(200):
            body.feed(frame(b"x" * 100))


def test_a_large_chunk_in_small_pieces_is_not_scanned_again_for_each() -> None:
    body = ChunkedBody(whole_events=False)
    wire = frame(b"x" * 3_000_000)
    pieces = [wire[i : i + 100] for i in range(0, len(wire), 100)]
    blocks = [body.feed(piece) for piece in pieces]
    assert blocks[-1] == wire and not any(blocks[:-1])


@settings(deadline=None)
@given(size=st.integers(0, 50), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_a_sized_body_ends_at_its_length(size: int, cuts: list[int]) -> None:
    body = SizedBody(size)
    assert body.has_ended == (size == 0)
    data = bytes(range(size)) + b"more"
    got = b""
    for piece in split(data, cuts):
        if body.has_ended:
            break
        got += body.feed(piece)
    assert got == data[:size] and body.has_ended and b"more".startswith(body.surplus)


def test_a_head_keeps_end_to_end_headers_in_order() -> None:
    head = parse_head(
        b"HTTP/1.1 200 OK\r\nB: 1\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nA:  x y \r\n"
        b"Keep-Alive: timeout=1\r\nB: \xc4\x8f\r\nContent-Length: 5\r\nContent-Type: Text/Event-Stream; a=b"
    )
    assert head.headers == (
        ("B", "1"),
        ("A", "x y"),
        ("B", "ď"),
        ("Content-Type", "Text/Event-Stream; a=b"),
    )
    assert (head.length, head.is_event_stream, head.keeps_alive) == (5, True, True)


@pytest.mark.parametrize(
    ("head", "length", "keeps_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0", 0, True),
        (b"HTTP/1.1 200\r\nContent-Length: 3\r\nContent-Length: 3", 3, True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3", 3, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: Close", 3, False),
        (b"HTTP/1.1 204 No Content", 0, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked", None, True),
    ],
)
def test_the_length_and_the_fate_of_the_connection(
    head: bytes, length: int | None, keeps_alive: bool
) -> None:
    parsed = parse_head(head)
    assert (parsed.length, parsed.keeps_alive) == (length, keeps_alive)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"garbage",
        b"HTTP/2 200 OK\r\nContent-Length: 0",
        b"HTTP/1.1 20 OK\r\nContent-Length: 0",
        b"HTTP/1.1 000 OK\r\nContent-Length: 0",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 0",
        b"HTTP/1.1 200 O\x00K\r\nContent-Length: 0",
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xc2\xb2",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999999999",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nContent-Length : 1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n folded: x",
        b"HTTP/1.1 200 OK\r\nX: a\nb\r\nContent-Length: 1",
        b"HTTP/1.1 200 OK\r\nX: \xff\r\nContent-Length: 1",
        b"HTTP/1.1 200 OK\r\n: x\r\nContent-Length: 1",
    ],
)
def test_a_hostile_head_is_refused(head: bytes) -> None:
    with pytest.raises(FramingError):
        parse_head(head)
