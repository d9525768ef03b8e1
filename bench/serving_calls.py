"""Single requests to a server under bench, by blocking sockets: timed, or left in the middle."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ANSWER_S = 600.0
# A client that only wants to know whether it is answered waits no longer.
TRY_S = 10.0
CHAT = "/v1/chat/completions"
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class FirstText:
    """How a stream began.

    Attributes:
        ttft_s: from the request to the first piece of text.
        prompt_tokens: as the server counted them.
    """

    ttft_s: float
    prompt_tokens: int


class Caller:
    """Asks one model of one server.

    Args:
        port: of the server, on the loopback address.
        model: as it is named in requests.
    """

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    def answers(self, messages: Messages) -> bool:
        """Whether it answers with one token; False for any failure."""
        try:
            return self._ask(messages, TRY_S, max_tokens=1).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def first_text(self, messages: Messages, tokens: int = 4) -> FirstText:
        """Stream a short answer to its end."""
        began = time.perf_counter()
        answer = self._ask(
            messages, max_tokens=tokens, stream=True, stream_options={"include_usage": True}
        )
        assert answer.status == 200, answer.read()
        first, prompt_tokens = 0.0, 0
        for event in _events(answer):
            choices = event["choices"]
            if not first and choices and choices[0]["delta"].get("content"):
                first = time.perf_counter() - began
            prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        assert first, "the answer has no text"
        return FirstText(first, prompt_tokens)

    def leave(self, messages: Messages, *, tokens: int, stream: bool, after_events: int) -> float:
        """Ask and hang up after some events, without any after half a second; when that was."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        connection.connect()
        sock = connection.sock
        assert isinstance(sock, socket.socket)
        connection.request(*self._request(messages, max_tokens=tokens, stream=stream))
        if after_events:
            answer = connection.getresponse()
            events = _events(answer)
            for _ in range(after_events):
                next(events)
        else:
            time.sleep(0.5)
        # The descriptor itself: a response that is read keeps its connection open.
        sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        return time.perf_counter()

    def _ask(
        self, messages: Messages, timeout_s: float = ANSWER_S, **fields: Any
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        connection.request(*self._request(messages, **fields))
        answer = connection.getresponse()
        if not fields.get("stream"):
            answer.read()
            connection.close()
        return answer

    def _request(self, messages: Messages, **fields: Any) -> tuple[str, str, bytes, dict[str, str]]:
        body = {"model": self._model, "messages": messages, "temperature": 0, **fields}
        headers = {"Content-Type": "application/json", "Connection": "close"}
        return "POST", CHAT, json.dumps(body).encode(), headers


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := answer.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
