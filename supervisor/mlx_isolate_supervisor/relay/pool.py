"""Connections to engines that are kept between requests, by the socket they lead to."""

import asyncio

from mlx_isolate_supervisor.relay.limits import (
    UPSTREAM_IDLE_CONNECTIONS_MAX,
    UPSTREAM_IDLE_MAX_S,
)
from mlx_isolate_supervisor.relay.upstream import EngineConnection


class EnginePool:
    """Makes connections and keeps a few idle ones.

    A socket path belongs to one incarnation, so an idle connection never leads to another
    engine than the one that its request was given a place in.
    """

    def __init__(self) -> None:
        self._idle: dict[str, list[tuple[float, EngineConnection]]] = {}

    async def take(self, socket_path: str) -> EngineConnection:
        """An idle connection that is open at this moment, or a new one.

        Raises:
            OSError: the engine cannot be connected to; nothing was sent.
        """
        loop = asyncio.get_running_loop()
        idle = self._idle.get(socket_path, [])
        while idle:
            since, connection = idle.pop()
            if loop.time() - since <= UPSTREAM_IDLE_MAX_S and connection.is_open:
                return connection
            connection.close()
        self._idle.pop(socket_path, None)
        _, connection = await loop.create_unix_connection(EngineConnection, socket_path)
        return connection

    def give(self, socket_path: str, connection: EngineConnection) -> None:
        """Take a connection back after an answer; it is kept or closed."""
        idle = self._idle.setdefault(socket_path, [])
        if connection.is_reusable and len(idle) < UPSTREAM_IDLE_CONNECTIONS_MAX:
            connection.rest()
            idle.append((asyncio.get_running_loop().time(), connection))
        else:
            connection.close()
        self._forget_dead()

    def drop(self, socket_path: str) -> None:
        """Close an engine's idle connections: it has closed one without reading what was sent.

        The kernel closes those of a dead engine one after the other, so others may look open.
        """
        for _, connection in self._idle.pop(socket_path, []):
            connection.close()

    def close(self) -> None:
        """Close every idle connection."""
        for path in tuple(self._idle):
            self.drop(path)

    def _forget_dead(self) -> None:
        """Drop the sockets of engines that are gone; a daemon outlives thousands of them."""
        for path, idle in list(self._idle.items()):
            idle[:] = [entry for entry in idle if entry[1].is_connected]
            if not idle:
                del self._idle[path]
