"""Random bytes on the HTTP port and on an engine's socket: an answer or an end, and nothing breaks."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator

import psutil
import pytest

from tests.material.http_bytes import BODY, CHAT, random_bytes, request
from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for

# A connection whose client has closed its half ends within this time, whatever it has sent.
END_S = 20.0
AT_ONCE = 8

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]


async def talk(connect: Connect, data: bytes, chance: random.Random) -> bytes:
    """Send `data` in random parts, close our half, read to the end."""
    reader, writer = await connect()
    try:
        at = 0
        while at < len(data):
            size = chance.choice((1, 7, 100, 5000, 1 << 20))
            writer.write(data[at : at + size])
            at += size
            await writer.drain()
        how = chance.randrange(8)
        if how == 0:
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            return b""
        if how == 1:
            return b""
        writer.write_eof()
        async with asyncio.timeout(END_S):
            return await reader.read(-1)
    except TimeoutError:
        raise
    except OSError:
        # The other side had closed first.
        return b""
    finally:
        writer.close()


def statuses(answer: bytes, errors_are_json: bool = True) -> list[int]:
    """The status of each response in what came back; fails if that is no HTTP."""
    found: list[int] = []
    while answer:
        head, mark, answer = answer.partition(b"\r\n\r\n")
        words = head.split(b" ", 2)
        assert words[0].startswith(b"HTTP/") and mark, (head[:200], found)
        found.append(int(words[1]))
        headers = head.lower()
        if found[-1] < 200:
            continue
        if b"transfer-encoding: chunked" in headers:
            _, mark, answer = answer.partition(b"0\r\n\r\n")
        elif b"content-length: " in headers:
            size = int(headers.split(b"content-length: ")[1].split(b"\r\n")[0])
            body = answer[:size]
            if answer[:5] == b"HTTP/" and size:
                continue  # the answer to a HEAD has a length and no body
            if errors_are_json and found[-1] >= 400 and body:
                assert body[:1] == b"{" and json.loads(body)["error"]["message"], (head, body)
            answer = answer[size:]
        else:
            answer = b""
    return found


async def assail(connect: Connect, examples: int, seed: int, errors_are_json: bool = True) -> None:
    """Many hostile connections, some at a time; no answer may be a fault of the server's."""
    chance = random.Random(seed)
    cases = [(random_bytes(chance), random.Random(chance.random())) for _ in range(examples)]
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(data: bytes, own: random.Random) -> None:
        async with limit:
            try:
                answer = await talk(connect, data, own)
                assert all(status < 500 for status in statuses(answer, errors_are_json)), answer[
                    :500
                ]
            except (AssertionError, TimeoutError, ValueError) as error:
                raise AssertionError(f"seed {seed}, sent {data[:600]!r}: {error!r}") from error

    await asyncio.gather(*(one(data, own) for data, own in cases))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    home = tmp_path_factory.mktemp("bytes")
    model = str(fake_model(home / "m"))
    with RunningDaemon(home / "home", model, "--served-model-name", "m") as running:
        running.wait_state("ready")
        yield running


def assail_daemon(daemon: RunningDaemon, examples: int, seed: int) -> None:
    before = daemon.status()["models"][0]
    supervisor = psutil.Process(daemon.process.pid)
    daemon.chat("m")
    descriptors, said = supervisor.num_fds(), len(daemon.stderr)
    asyncio.run(assail(lambda: asyncio.open_connection("127.0.0.1", daemon.port), examples, seed))
    assert daemon.chat("m").status == 200
    after = daemon.status()["models"][0]
    assert (after["pid"], after["restarts"]) == (before["pid"], before["restarts"])
    wait_for(lambda: supervisor.num_fds() <= descriptors + 8, END_S, "descriptors are given back")
    wait_for(lambda: daemon.status()["models"][0]["active"] == 0, END_S, "no request is left")
    assert "Traceback" not in daemon.stderr[said:]


def test_600_hostile_connections_leave_the_daemon_as_it_was(daemon: RunningDaemon) -> None:
    assail_daemon(daemon, 600, seed=4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_50000_hostile_connections_leave_the_daemon_as_it_was(daemon: RunningDaemon) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    assail_daemon(daemon, 50_000, seed)


HIDDEN = request("GET", "/v1/models", "X-Hidden: 1")
AMBIGUOUS: dict[str, bytes] = {
    "both lengths": request(
        "POST", CHAT, "Content-Length: 6", "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + HIDDEN
    ),
    "both lengths, the other way round": request(
        "POST", CHAT, "Transfer-Encoding: chunked", "Content-Length: 6", body=b"0\r\n\r\n" + HIDDEN
    ),
    "two lengths": request("POST", CHAT, "Content-Length: 0", "Content-Length: 5", body=HIDDEN),
    "a list of lengths": request("POST", CHAT, "Content-Length: 0, 5", body=HIDDEN),
    "a signed length": request("POST", CHAT, "Content-Length: +2", body=b"{}" + HIDDEN),
    "a negative length": request("POST", CHAT, "Content-Length: -2", body=b"{}" + HIDDEN),
    "a hexadecimal length": request("POST", CHAT, "Content-Length: 0x2", body=b"{}" + HIDDEN),
    "a space before the colon": request("POST", CHAT, "Content-Length : 2", body=b"{}" + HIDDEN),
    "a coding that is not the last": request(
        "POST", CHAT, "Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n" + HIDDEN
    ),
    "an unknown coding": request(
        "POST", CHAT, "Transfer-Encoding: xchunked", body=b"0\r\n\r\n" + HIDDEN
    ),
    "chunked twice": request(
        *("POST", CHAT, "Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        body=b"0\r\n\r\n" + HIDDEN,
    ),
    "a chunk of a huge size": request(
        "POST", CHAT, "Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\n" + HIDDEN
    ),
    "a chunk of a negative size": request(
        "POST", CHAT, "Transfer-Encoding: chunked", body=b"-1\r\n" + HIDDEN
    ),
    "a chunk that is longer than it says": request(
        "POST", CHAT, "Transfer-Encoding: chunked", body=b"1\r\nabc\r\n0\r\n\r\n" + HIDDEN
    ),
    "a NUL in a header": request("POST", CHAT, "X: a\x00b", body=BODY) + HIDDEN,
    "a bare CR in a header": request("POST", CHAT, "X: a\rY: b", body=BODY) + HIDDEN,
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_request_of_unclear_length_ends_its_connection(daemon: RunningDaemon, name: str) -> None:
    async def exchange() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        writer.write(AMBIGUOUS[name])
        async with asyncio.timeout(END_S):
            answer = await reader.read(-1)
        writer.close()
        return answer

    assert statuses(asyncio.run(exchange())) == [400]
