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
# Groups of completions whose choices are numbered at a time: those of requests that are prepared
# right now. One that is forgotten too early has its prompt logged again, and begins at 0.
GROUPS_MAX = 64

log = logging.getLogger(__name__)


class TextLog:
    """A completion service that logs what it is asked and what it answers, and passes both on.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: ModelCompletionService) -> None:
        self._inner = inner
        self._choices: dict[str, int] = {}

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        """See `CompletionService.prepare`."""
        prepared = await self._inner.prepare(request)
        about, choice = f"request={request.request_id}", self._number(request.group)
        if not choice:
            # Once for all choices: with a hundred of them it would be all that the log holds.
            prompt: dict[str, Any] = msgspec.to_builtins(request.prompt)
            del prompt["param"]  # what refusals call it, no part of it
            _log_text("prompt", about, json.dumps(prompt, ensure_ascii=False))
        return _Logged(prepared, about if choice is None else f"{about} choice={choice}")

    async def count_tokens(self, request: CompletionRequest) -> int:
        """See `CompletionService.count_tokens`."""
        return await self._inner.count_tokens(request)

    async def close(self) -> None:
        """Close the inner one."""
        await self._inner.close()

    def _number(self, group: str | None) -> int | None:
        """Which of its group's choices this is, counted from 0; None without a group."""
        if group is None:
            return None
        number = self._choices.pop(group, 0)
        self._choices[group] = number + 1
        if len(self._choices) > GROUPS_MAX:
            del self._choices[next(iter(self._choices))]
        return number


class _Logged:
    """Implements `PreparedCompletion` around another; `about` says which one it is."""

    def __init__(self, inner: PreparedCompletion, about: str) -> None:
        self._inner = inner
        self._about = about
        self._texts: dict[str, _Text] = {}

    @property
    def prompt_tokens(self) -> int:
        return self._inner.prompt_tokens

    @property
    def notices(self) -> tuple[str, ...]:
        return self._inner.notices

    async def execute(self, sink: Sink) -> CompletionSummary:
        async def keep(event: Event) -> None:
            self._keep(event)
            await sink(event)

        try:
            return await self._inner.execute(keep)
        finally:
            # Also of an answer that was cut off: that is the one somebody looks for.
            for kind, text in self._texts.items():
                _log_text(kind, self._about, text.whole(), text.characters)

    async def close(self) -> None:
        await self._inner.close()

    def _keep(self, event: Event) -> None:
        match event:
            case ContentDelta():
                self._text("answer").add(event.text)
            case ReasoningDelta():
                self._text("reasoning").add(event.text)
            case ToolCallDelta():
                text = self._text("tool_call")
                if event.name is not None:
                    # Each call on a line of its own, its name first.
                    text.add(("\n" if text.characters else "") + event.name + " ")
                text.add(event.arguments)
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


def _log_text(kind: str, about: str, text: str, characters: int | None = None) -> None:
    """Log a text as JSON strings, a line at a time.

    Args:
        kind: prompt, answer, reasoning or tool_call.
        about: which completion's it is.
        text: at least its first TEXT_CHARACTERS_MAX characters.
        characters: of the whole text; None = all of it is here.
    """
    left = (len(text) if characters is None else characters) - TEXT_CHARACTERS_MAX
    for line in split_lines(text[:TEXT_CHARACTERS_MAX], LINE_CHARACTERS_MAX):
        log.info("text.%s %s %s", kind, about, line)
    if left > 0:
        log.info("text.%s %s characters_left_out=%d", kind, about, left)


def split_lines(text: str, characters_max: int) -> list[str]:
    """The text as JSON strings of at most `characters_max` ASCII characters each (and at least 14).

    Joined after decoding they are the text; an empty text is one empty string.
    """
    lines: list[str] = []
    line, size = "", 2
    for character in text:
        written = _written(character)
        if size + written > characters_max:
            lines.append(json.dumps(line))
            line, size = "", 2
        line += character
        size += written
    return [*lines, json.dumps(line)]


def _written(character: str) -> int:
    """Characters that it takes in a JSON string of ASCII."""
    if " " <= character <= "~":
        return 2 if character in '"\\' else 1
    if character in "\n\r\t\b\f":
        return 2
    return 12 if character > "\uffff" else 6
