"""A WebSocket through the relay under test: its handshake, and what is read from it."""

import struct

from mlx_isolate_supervisor.relay.limits import MIB
from tests.fakes.fake_websocket import BINARY, CLOSE, frame, read_frame
from tests.integration.relay.client_side import Client
from tests.integration.relay.engine_side import EngineSide
from tests.integration.relay.rig import Rig, soon

ASK = (
    b"GET /upstream/m/ws?x=1 HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive, Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Key: a2V5\r\nSec-WebSocket-Version: 13\r\n"
)
ACCEPT = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: YQ==\r\n\r\n"
)
BLOCK = frame(BINARY, b"x" * 16 * 1024)
# What may lie between the two ends of one direction: buffers of this process and the kernel's.
ON_THE_WAY_MAX = 8 * MIB


async def open_socket(rig: Rig) -> tuple[Client, EngineSide]:
    """A client and an engine with a WebSocket between them."""
    client = await rig.connect()
    await client.send(ASK + b"\r\n")
    side = await rig.engine.accept()
    await side.read_head()
    await side.send(ACCEPT)
    assert (await client.read_head()).startswith(b"HTTP/1.1 101 ")
    return client, side


async def read_close(client: Client) -> tuple[int, str]:
    """Code and reason of the close frame that must come next."""
    opcode, payload = await soon(read_frame(client.reader), 5)
    assert opcode == CLOSE
    return struct.unpack(">H", payload[:2])[0], payload[2:].decode()
