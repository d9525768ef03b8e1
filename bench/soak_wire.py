"""Requests of a soak in the words of each protocol, and what an answer in them says; pure."""

import json
from dataclasses import dataclass, field
from typing import Any

from bench.soak_plan import Api, Request

PATHS: dict[Api, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@dataclass
class Heard:
    """What an answer has told so far."""

    text: str = ""
    arguments: str = ""
    call: str = ""
    events: int = 0
    is_done: bool = False
    has_finished: bool = False
    errors: list[str] = field(default_factory=list[str])


def request_body(request: Request, prompt: str, tokens: int) -> bytes:
    """The JSON of one good request; greedy, whatever the configuration says."""
    turns = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {
        "model": request.model,
        "stream": request.stream,
        "temperature": 0,
        "max_tokens": tokens,
    }
    match request.api:
        case "completions":
            body["prompt"] = prompt
        case "responses":
            body["input"] = turns
            body["max_output_tokens"] = body.pop("max_tokens")
            body["store"] = False
        case _:
            body["messages"] = turns
    if request.kind == "tools":
        body["tools"] = [TOOL]
    return json.dumps(body).encode()


def tool_call_text(number: int) -> str:
    """A call as the model writes it, which the parrot is told to say."""
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>'


def hear_whole(heard: Heard, data: Any) -> None:
    """Take in the JSON of an answer that is no stream."""
    if data.get("error"):
        heard.errors.append(str(data["error"].get("code")))
        return
    heard.is_done = heard.has_finished = True
    for choice in data.get("choices", ()):
        heard.text += choice.get("text") or ""
        _hear_chat(heard, choice.get("message") or {})
    for block in data.get("content", ()):
        heard.text += block.get("text", "")
    for item in data.get("output", ()):
        heard.text += "".join(part.get("text", "") for part in item.get("content", ()))


def hear_event(heard: Heard, line: str) -> None:
    """Take in one line of a stream."""
    if not line.startswith("data: "):
        return
    heard.events += 1
    if line == "data: [DONE]":
        heard.is_done = True
        return
    data = json.loads(line[6:])
    if data.get("error"):
        heard.errors.append(str(data["error"].get("code")))
        return
    for choice in data.get("choices", ()):
        heard.text += choice.get("text") or ""
        _hear_chat(heard, choice.get("delta") or {})
        heard.has_finished |= bool(choice.get("finish_reason"))
    match data.get("type"):
        case "content_block_delta":
            heard.text += data["delta"].get("text", "")
        case "response.output_text.delta":
            heard.text += data["delta"]
        case "message_stop" | "response.completed" | "response.incomplete":
            heard.is_done = heard.has_finished = True
        case _:
            pass


def _hear_chat(heard: Heard, message: dict[str, Any]) -> None:
    heard.text += message.get("content") or ""
    for call in message.get("tool_calls") or ():
        heard.call += call["function"].get("name") or ""
        heard.arguments += call["function"].get("arguments") or ""


def malformed(variant: int, model: str) -> tuple[bytes, tuple[int, ...]]:
    """One broken request, raw, and which statuses may answer it (0 = the connection ends)."""
    good = [{"role": "user", "content": "hi"}]
    bodies: list[tuple[Any, tuple[int, ...]]] = [
        (b"{", (400,)),
        (b"\xff\xfe\x00", (400,)),
        (b"[]", (400,)),
        ({"model": "nobody", "messages": good}, (404,)),
        ({"model": model, "messages": 3}, (400,)),
        ({"model": model, "messages": []}, (400,)),
        ({"model": model, "messages": good, "max_tokens": "many"}, (400,)),
        ({"model": model, "messages": good, "temperature": "hot"}, (400,)),
        ({"model": model, "messages": [{"role": "user", "content": "y" * 20000}]}, (400,)),
        ({"model": model, "messages": good, "stop": [[1]]}, (400,)),
        ({"model": model, "messages": good, "top_k": 1.5}, (400,)),
    ]
    smuggled = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    short = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
    heads: list[tuple[bytes, tuple[int, ...]]] = [
        (b"BREW\r\n\r\n", (400,)),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,)),
        (
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70000 + b"\r\n\r\n",
            (400, 431),
        ),
        (smuggled, (400,)),
        (short, (0, 400)),
        (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", (403,)),
    ]
    at = variant % (len(bodies) + len(heads))
    if at >= len(bodies):
        return heads[at - len(bodies)]
    content, statuses = bodies[at]
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = (
        f"POST {PATHS['chat']} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body, statuses
