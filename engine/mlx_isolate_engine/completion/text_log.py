"""Prompts and answers in the log, where the operator has asked for them with `--log-text`."""

import json
import logging
from typing import Any

import msgspec

from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallDelta,
)
from mlx_isolate_engine.completion.request import CompletionRequest
from mlx_isolate_engine.completion.seam import PreparedCompletion, Sink
from mlx_isolate_engine.completion.service import ModelCompletionService

# Characters of one prompt, or of one kind of text of an answer, that are logged; the rest is
# counted. Without a bound one request could push everything else out of the log.
TEXT_CHARACTERS_MAX = 16_384
# Characters of one line, escapes included; a line that is longer would be cut on its way.
LINE_CHARACTERS_MAX = 3_000

log = logging.getLogger(__name__)


class TextLog:
    """A completion service that logs what it is asked and what it answers, and passes both on.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: ModelCompletionService) -> None:
        self._inner = inner

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        """See `CompletionService.prepare`."""
        prepared = await self._inner.prepare(request)
        prompt: dict[str, Any] = msgspec.to_builtins(request.prompt)
        _log_text("prompt", request.request_id, json.dumps(prompt, ensure_ascii=False))
        return _Logged(prepared, request.request_id)

    async def count_tokens(self, request: CompletionRequest) -> int:
        """See `CompletionService.count_tokens`."""
        return await self._inner.count_tokens(request)

    async def close(self) -> None:
        """Close the inner one."""
        await self._inner.close()


class _Logged:
    """Implements `PreparedCompletion` around another."""

    def __init__(self, inner: PreparedCompletion, request_id: str) -> None:
        self._inner = inner
        self._request_id = request_id
        self._texts: dict[str, _Text] = {}

    @property
    def prompt_tokens(self) -> int:
        return self._inner.prompt_tokens

    async def execute(self, sink: Sink) -> CompletionSummary:
        async def keep(event: Event) -> None:
            self._keep(event)
            await sink(event)

        try:
            return await self._inner.execute(keep)
        finally:
            # Also of an answer that was cut off: that is the one somebody looks for.
            for kind, text in self._texts.items():
                _log_text(kind, self._request_id, text.whole(), text.characters)

    async def close(self) -> None:
        await self._inner.close()

    def _keep(self, event: Event) -> None:
        match event:
            case ContentDelta():
                self._text("answer").add(event.text)
            case ReasoningDelta():
                self._text("reasoning").add(event.text)
            case ToolCallDelta():
                self._text("tool_call").add(f"{event.name or ''}{event.arguments}")
            case _:
                pass

    def _text(self, kind: str) -> "_Text":
        return self._texts.setdefault(kind, _Text())


class _Text:
    """The beginning of a text that comes in parts."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.characters = 0

    def add(self, part: str) -> None:
        if self.characters < TEXT_CHARACTERS_MAX:
            self._parts.append(part)
        self.characters += len(part)

    def whole(self) -> str:
        return "".join(self._parts)


def _log_text(kind: str, request_id: str, text: str, characters: int | None = None) -> None:
    """Log a text as JSON strings, a line at a time.

    Args:
        kind: prompt, answer, reasoning or tool_call.
        text: at least its first TEXT_CHARACTERS_MAX characters.
        characters: of the whole text; None = all of it is here.
    """
    left = (len(text) if characters is None else characters) - TEXT_CHARACTERS_MAX
    for line in split_lines(text[:TEXT_CHARACTERS_MAX], LINE_CHARACTERS_MAX):
        log.info("text.%s request=%s %s", kind, request_id, line)
    if left > 0:
        log.info("text.%s request=%s characters_left_out=%d", kind, request_id, left)


def split_lines(text: str, characters_max: int) -> list[str]:
    """The text as JSON strings of at most `characters_max` ASCII characters each (and at least 14).

    Joined after decoding they are the text; an empty text is one empty string.
    """
    lines: list[str] = []
    line, size = "", 2
    for character in text:
        written = len(json.dumps(character)) - 2
        if size + written > characters_max:
            lines.append(json.dumps(line))
            line, size = "", 2
        line += character
        size += written
    return [*lines, json.dumps(line)]
