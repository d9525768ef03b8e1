"""From one row's tokens to events: characters, stop strings, reasoning, tool calls, logprobs."""

from typing import Any

from mlx_isolate_engine.completion.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    TokenLogprob,
)
from mlx_isolate_engine.generation.decoding import StreamDecoder
from mlx_isolate_engine.generation.ledger import LogprobLedger
from mlx_isolate_engine.generation.plan import TextPlan
from mlx_isolate_engine.generation.scan import Span, StateScanner, StopScanner
from mlx_isolate_engine.generation.tool_calls import ToolCallReader, transitions_of


class TextAssembly:
    """The text of one completion while it is made.

    Stop strings are looked for in the raw text, before reasoning and tool markers are taken out.

    Args:
        plan: the request's stop strings, tools and so on.
        decoder: a fresh one.
        tokenizer: mlx_lm's TokenizerWrapper, for the family's markers and tool parser.
    """

    def __init__(self, plan: TextPlan, decoder: StreamDecoder, tokenizer: Any) -> None:
        self._decoder = decoder
        self._stop = StopScanner(plan.stop) if plan.stop else None
        self._ledger = LogprobLedger() if plan.top_logprobs is not None else None
        self._trim = plan.trim_space
        self._tools = (
            ToolCallReader(
                tokenizer.tool_parser,
                plan.tools,
                streams=plan.stream_calls,
                one_call=plan.one_call,
            )
            if plan.tools and tokenizer.has_tool_calling
            else None
        )
        self._tool_closing = str(tokenizer.tool_call_end or "")
        self._one_call = plan.one_call
        self._states: StateScanner | None = None
        if plan.split_reasoning:
            transitions = transitions_of(tokenizer, with_tools=self._tools is not None)
            if transitions:
                self._states = StateScanner(transitions, plan.initial_state)
        self._tool_opening = ""
        self._tool_text = ""
        self.reasoning_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that is complete; the row has to end."""
        return self._stop.matched if self._stop else None

    @property
    def is_whole(self) -> bool:
        """Whether nothing may follow: a stop string, or the one call that was allowed."""
        return self.stop_string is not None or (self._one_call and self.has_tool_calls)

    @property
    def has_tool_calls(self) -> bool:
        """Whether at least one well-formed call was made."""
        return self._tools is not None and self._tools.count > 0

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> list[Event]:
        """Events that are certain now that `token` has come (not for an end-of-text token)."""
        text = self._decoder.add(token)
        if self._trim and text:
            self._trim = False
            if text[0] == " ":
                text = text[1:]
                logprob = _without_first_byte(logprob)
        if self._ledger is not None and logprob is not None:
            self._ledger.add(logprob, text, pending=self._decoder.pending)
        if self._states is not None and self._states.state == "reasoning":
            self.reasoning_tokens += 1
        return self._pass_on(text)

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """The last events, when no more tokens come.

        Args:
            is_cut: the model would have gone on.
        """
        events: list[Event] = []
        if self.stop_string is None:
            events += self._pass_on(self._decoder.flush())
            if self._stop is not None:
                events += self._classify(self._stop.flush())
        if self._states is not None:
            for span in self._states.flush():
                self._handle(span, events)
        if self._tool_opening:
            self._close_tool("", events, is_cut=is_cut or self._is_cut_by_stop)
        if self._ledger is not None and (left := self._ledger.finish()):
            events.append(ContentDelta(text="", logprobs=left))
        return events

    def _pass_on(self, text: str) -> list[Event]:
        if not text:
            return []
        return self._classify(self._stop.feed(text) if self._stop is not None else text)

    def _classify(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        if self._states is None:
            self._add_content(text, events)
            return events
        for span in self._states.feed(text):
            self._handle(span, events)
        return events

    def _handle(self, span: Span, events: list[Event]) -> None:
        match span.state:
            case "normal":
                self._add_content(span.text, events)
            case "tool":
                assert self._tools is not None
                self._tool_text += span.text
                events.extend(self._tools.feed(span.text))
                if span.marker:
                    self._close_tool(span.marker, events)
                return
            case _:
                if span.text and span.state == "reasoning":
                    events.append(ReasoningDelta(text=span.text))
                self._skip(len(span.text))
        if span.after == "tool":
            self._tool_opening = span.marker
        else:
            self._skip(len(span.marker))

    @property
    def _is_cut_by_stop(self) -> bool:
        """Whether a stop string has ended the text elsewhere than at the end of a tool block."""
        stop = self.stop_string
        return stop is not None and not (stop in self._tool_closing or self._tool_closing in stop)

    def _close_tool(self, closing: str, events: list[Event], *, is_cut: bool = False) -> None:
        """A tool block has ended: its calls, or its raw text if there is none in it."""
        assert self._tools is not None
        raw = self._tool_opening + self._tool_text + closing
        calls = self._tools.close(self._tool_text, is_cut=is_cut)
        self._tool_opening = self._tool_text = ""
        if calls is None:
            self._add_content(raw, events)
        else:
            self._skip(len(raw))
            events.extend(calls)

    def _add_content(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        logprobs = self._ledger.take(len(text)) if self._ledger is not None else ()
        events.append(ContentDelta(text=text, logprobs=logprobs))

    def _skip(self, length: int) -> None:
        if self._ledger is not None and length:
            self._ledger.skip(length)


def _without_first_byte(logprob: TokenLogprob | None) -> TokenLogprob | None:
    if logprob is None:
        return None
    return TokenLogprob(
        token=logprob.token[1:], raw=logprob.raw[1:], logprob=logprob.logprob, top=logprob.top
    )
