"""A running daemon as the client commands see it: one HTTP request at a time."""

import argparse
import http.client
import os
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.commands.errors import CommandError, NoAnswerError
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.listening import url_of

# Status pages are answered from memory, so a daemon that needs longer is not well.
ANSWER_TIMEOUT_S = 10.0
# Whoever has the port may be no web server at all, and never answer.
ROOT_TIMEOUT_S = 1.0
ROOT_BYTES_MAX = 4096
# Ways in which a connection says that the other side has gone, or never spoke HTTP.
_BROKEN = (OSError, http.client.HTTPException)

_T = TypeVar("_T")


class _ErrorObject(msgspec.Struct):
    message: str


class _Envelope(msgspec.Struct):
    error: _ErrorObject


class _Root(msgspec.Struct):
    name: str = ""


class Reply(msgspec.Struct, frozen=True):
    """Status and body of an answer."""

    status: int
    body: bytes


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --url and --api-key, which every command that talks to a daemon takes."""
    parser.add_argument(
        "--url",
        default=None,
        metavar="URL",
        help="address of the daemon (MLX_ISOLATE_URL; default http://127.0.0.1:8080)",
    )
    parser.add_argument(
        "--api-key", default=None, metavar="KEY", help="key to send (MLX_ISOLATE_API_KEY)"
    )


def daemon_of(args: argparse.Namespace) -> "Daemon":
    """The daemon that --url, the environment or the default address names."""
    port = os.environ.get("MLX_ISOLATE_PORT", "8080")
    url = args.url or os.environ.get("MLX_ISOLATE_URL") or f"http://127.0.0.1:{port}"
    keys = args.api_key or os.environ.get("MLX_ISOLATE_API_KEY") or ""
    return Daemon(url, keys.split(",")[0].strip() or None)


def daemon_of_settings(settings: ServeSettings) -> "Daemon":
    """How to ask a daemon with these settings."""
    url = url_of(settings.host, settings.port)
    return Daemon(url, next(iter(settings.api_keys), None))


class Daemon:
    """Requests to one daemon.

    Args:
        url: `http://host:port`, a path in front of ours allowed, and OpenAI's `/v1` behind it.
        api_key: sent as a bearer token.

    Raises:
        ConfigError: `url` is not an http address.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        refusal = f"--url: {url!r} is not an address such as http://127.0.0.1:8080."
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(refusal) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(refusal)
        self.url = url
        self.api_key = api_key
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self._secure = parts.scheme == "https"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> bytes:
        """The body of a GET.

        Raises:
            CommandError: no answer, or an answer that is an error.
        """
        with self._open("GET", path, None, ANSWER_TIMEOUT_S) as answer:
            return self._read(answer)

    def post(self, path: str, body: object) -> bytes:
        """The body of a POST of `body` as JSON; waits for as long as the daemon takes.

        Raises:
            CommandError: no answer, or an answer that is an error.
        """
        with self._open("POST", path, msgspec.json.encode(body), None) as answer:
            return self._read(answer)

    def ask(self, method: str, path: str) -> "Reply":
        """Status and body, whatever the status; waits for as long as the daemon takes.

        Raises:
            CommandError: no answer.
        """
        with self._send(method, path, None, None) as answer:
            return Reply(answer.status, self._read(answer))

    def decode(self, body: bytes, kind: type[_T]) -> _T:
        """An answer's body as what a daemon of this version sends.

        Raises:
            CommandError: it is something else.
        """
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise CommandError(
                f"what answers at {self.url} is not mlx-isolate, or of another version ({error})"
            ) from error

    def refusal(self, reply: "Reply", path: str) -> CommandError:
        """What to tell a person about an answer that is an error."""
        message = _error_message(reply.body)
        if reply.status == 401 and message:
            which = "does not know that API key" if self.api_key else "wants an API key"
            return CommandError(
                f"the daemon at {self.url} {which}; give --api-key KEY or MLX_ISOLATE_API_KEY"
            )
        said = f"it said {reply.status} to {path}"
        return CommandError(message or f"what answers at {self.url} is not mlx-isolate: {said}")

    def is_ours(self) -> bool:
        """Whether what answers there calls itself mlx-isolate; told within a moment."""
        try:
            with self._send("GET", "/", None, ROOT_TIMEOUT_S) as answer:
                body = answer.read(ROOT_BYTES_MAX)
            return msgspec.json.decode(body, type=_Root).name == "mlx-isolate"
        except (CommandError, OSError, http.client.HTTPException, msgspec.DecodeError):
            return False

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a GET that may never end, as they come.

        Raises:
            CommandError: no answer, or an answer that is an error.
        """
        with self._open("GET", path, None, None) as answer:
            while line := self._read(answer, answer.readline):
                yield line.decode("utf-8", "replace").rstrip("\n")

    def _open(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> http.client.HTTPResponse:
        answer = self._send(method, path, body, timeout_s)
        if answer.status >= 400:
            with answer:
                raise self.refusal(Reply(answer.status, self._read(answer)), path)
        return answer

    def _send(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout_s)
        headers = {**self._headers, "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, self._prefix + path, body, headers)
            return connection.getresponse()
        except _BROKEN as error:
            connection.close()
            reason = getattr(error, "strerror", None) or "no proper answer"
            raise NoAnswerError(
                f"no daemon answers at {self.url} ({reason}); start one with 'mlx-isolate serve', "
                "or name another with --url."
            ) from error

    def _read(
        self, answer: http.client.HTTPResponse, read: Callable[[], bytes] | None = None
    ) -> bytes:
        """What `read`, or else the whole body, gives.

        Raises:
            NoAnswerError: it breaks off, or nothing comes.
        """
        try:
            return (read or answer.read)()
        except _BROKEN as error:
            raise NoAnswerError(f"the answer of the daemon at {self.url} broke off.") from error


def _error_message(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Envelope).error.message
    except msgspec.DecodeError:
        return None
