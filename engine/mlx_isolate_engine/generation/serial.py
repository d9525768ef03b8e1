"""The serial lane: one completion at a time, by mlx-lm's own single-row path.

For what a batch cannot do: draft models, KV quantization, kinds of cache that do not merge, and
the strict order that `--decode-concurrency 1` asks for.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import (
    generate_step,
    generation_stream,
    maybe_quantize_kv_cache,
    speculative_generate_step,
)
from mlx_lm.models.cache import make_prompt_cache

from mlx_isolate_engine.completion.events import FinishReason
from mlx_isolate_engine.generation import quantization
from mlx_isolate_engine.generation.endings import Endings
from mlx_isolate_engine.generation.lane import LaneParts
from mlx_isolate_engine.generation.outbox import RESUME_SHARE
from mlx_isolate_engine.generation.pacing import PrefillPace
from mlx_isolate_engine.generation.row import Row
from mlx_isolate_engine.generation.sampling import Processor
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_shared.errors import EngineError

log = logging.getLogger(__name__)

Work = Generator[None, None, None]
Tokens = Generator[int, None, None]


class SerialLane:
    """Runs rows one after the other, in order of arrival.

    A row whose reader has stopped is set aside, and the next one runs meanwhile.

    Args:
        parts: what it works with.
    """

    def __init__(self, parts: LaneParts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._reuse = parts.reuse
        self._counters = parts.counters
        self._endings = Endings("serial", parts.counters, parts.deliveries)
        self._pace = PrefillPace(parts.settings.max_step_s, parts.settings.prefill_step_size)
        self._waiting: deque[Row] = deque()
        self._ready: deque[tuple[Row, Work]] = deque()
        self._parked: dict[Ticket, tuple[Row, Work]] = {}

    def has_work(self) -> bool:
        """See `Lane.has_work`."""
        return bool(self._ready or self._waiting)

    def flushes_soon(self) -> bool:
        """See `Lane.flushes_soon`."""
        return False

    def wait_s(self) -> float:
        """See `Lane.wait_s`: one row at a time gains nothing by waiting."""
        return 0.0

    def submit(self, ticket: Ticket) -> None:
        """See `Lane.submit`."""
        self._waiting.append(Row(ticket, self._parts.family, self._parts.clock))

    def resume(self, ticket: Ticket) -> None:
        """See `Lane.resume`."""
        if (parked := self._parked.pop(ticket, None)) is not None:
            ticket.is_parked = False
            self._ready.append(parked)

    def drop(self, ticket: Ticket) -> None:
        """See `Lane.drop`; what its cache holds is kept."""
        for row in self._waiting:
            if row.ticket is ticket:
                self._waiting.remove(row)
                self._endings.drop(ticket)
                return
        started = [*self._ready, *self._parked.values()]
        for row, work in started:
            if row.ticket is ticket:
                self._parked.pop(ticket, None)
                self._ready = deque(each for each in self._ready if each[0] is not row)
                work.close()
                self._counters.active -= 1
                self._endings.drop(ticket)
                return

    def close(self, error: EngineError) -> None:
        """See `Lane.close`."""
        rows = list(self._waiting)
        for row, work in (*self._ready, *self._parked.values()):
            work.close()
            rows.append(row)
        for row in rows:
            self._endings.refuse(row.ticket, error)
        self._waiting.clear()
        self._ready.clear()
        self._parked.clear()
        self._counters.active = 0

    def step(self) -> None:
        """One piece of prefill, or one token, of the row whose turn it is."""
        if not self._ready:
            row = self._waiting.popleft()
            self._counters.active += 1
            self._ready.append((row, self._work(row)))
        row, work = self._ready[0]
        if self._parts.adapters is not None:
            self._parts.adapters.mount(row.plan.adapter)
        try:
            next(work)
        except StopIteration:
            self._ready.popleft()
            self._counters.active -= 1
            return
        if row.ticket.outbox.unread_bytes > self._settings.stall_buffer_bytes:
            self._park(row)

    def _park(self, row: Row) -> None:
        self._parked[row.ticket] = self._ready.popleft()
        row.ticket.is_parked = True
        log.info("completion.parked request=%s", row.plan.request_id)
        # The reader may have caught up just before it could see that the row is parked.
        if row.ticket.outbox.unread_bytes <= self._settings.stall_buffer_bytes * RESUME_SHARE:
            self.resume(row.ticket)

    def _work(self, row: Row) -> Work:
        """A whole completion; yields after every bounded piece, and may be closed at any."""
        cache, reused = yield from self._reuse.find(row)
        if cache is None:
            cache = make_prompt_cache(self._parts.model)
            if row.plan.draft_tokens:  # mlx-lm keeps both in one list
                cache += make_prompt_cache(self._parts.draft)
        tokens = list(row.plan.prompt.tokens[:reused])
        row.start(reused)
        is_prefilled = has_failed = False
        try:
            yield from self._prefill(row, cache, tokens)
            is_prefilled = True
            ending = yield from self._decode(row, cache, tokens)
            if isinstance(ending, Exception):
                has_failed = True
                self._endings.fail(row.ticket, ending)
            else:
                self._endings.complete(row, ending)
                self._parts.deliveries.flush()  # nobody should wait for what is kept
        except Exception:
            has_failed = True  # in the middle of a pass: no layer can be trusted
            raise
        finally:
            if not has_failed:
                self._reuse.keep(row, tokens, cache, "assistant" if is_prefilled else "partial")

    def _prefill(self, row: Row, cache: list[Any], tokens: list[int]) -> Work:
        """Run the prompt but for its last token, in pieces; `tokens` says what has run."""
        prompt = row.plan.prompt
        for checkpoint in self._reuse.checkpoints(prompt, len(tokens)):
            while len(tokens) < checkpoint.end:
                size = self._piece(len(tokens), checkpoint.end)
                piece = prompt.tokens[len(tokens) : len(tokens) + size]
                self._run_piece(cache, piece, with_draft=row.plan.draft_tokens > 0)
                tokens += piece
                self._note_prefill(row, len(tokens))
                yield
            self._reuse.keep_checkpoint(row, tokens, cache, checkpoint.kind)

    def _piece(self, done: int, end: int) -> int:
        # Where quantization begins depends on the pieces, so there they are always the same.
        if self._settings.kv_bits is not None:
            return min(quantization.piece(done, step=self._settings.prefill_step_size), end - done)
        return self._pace.width(end - done, 1, is_quiet=True)

    def _run_piece(self, cache: list[Any], piece: list[int], *, with_draft: bool) -> None:
        before = self._parts.clock.monotonic()
        with mx.stream(generation_stream):
            inputs = mx.array(piece)[None]
            self._parts.model(inputs, cache=cache)
            if with_draft:
                self._parts.draft(inputs, cache=cache[len(self._parts.model.layers) :])
            self._quantize(cache)
            mx.eval([part.state for part in cache])
        mx.clear_cache()
        seconds = self._parts.clock.monotonic() - before
        self._pace.observe(1, len(piece), seconds)
        self._reuse.note_prefill(len(piece), seconds)

    def _quantize(self, cache: list[Any]) -> None:
        settings = self._settings
        maybe_quantize_kv_cache(
            cache, settings.quantized_kv_start, settings.kv_group_size, settings.kv_bits
        )

    def _note_prefill(self, row: Row, length: int) -> None:
        new, progress = row.note_prefill(length - row.reused)
        self._counters.prompt_tokens += new
        self._parts.deliveries.add(row.ticket.outbox, [progress])

    def _decode(
        self, row: Row, cache: list[Any], tokens: list[int]
    ) -> Generator[None, None, FinishReason | Exception]:
        """Generate until the row ends; `tokens` grows with what the cache holds."""
        steps = self._steps(row, cache, tokens)
        tokens += row.plan.prompt.tokens[-1:]
        try:
            for token in steps:
                if row.generated == 0:
                    self._note_prefill(row, len(tokens))
                tokens.append(token)
                self._counters.generated_tokens += 1
                advance = row.take_token(token)
                if advance.error is not None:
                    return advance.error
                self._parts.deliveries.add(row.ticket.outbox, advance.events)
                if advance.reason is not None:
                    return advance.reason
                yield
        finally:
            steps.close()  # a draft's rejected tokens are cut off the cache here
        raise AssertionError("mlx-lm ended a row that had tokens left")

    def _steps(self, row: Row, cache: list[Any], tokens: list[int]) -> Tokens:
        """mlx-lm's tokens for a row whose prompt has run but for its last token."""
        plan = row.plan
        options: dict[str, Any] = {
            "max_tokens": plan.max_tokens,
            "sampler": row.sampler,
            "logits_processors": _with_history(row.processors, tokens),
            "prompt_cache": cache,
            "kv_bits": self._settings.kv_bits,
            "kv_group_size": self._settings.kv_group_size,
            "quantized_kv_start": self._settings.quantized_kv_start,
        }
        last = mx.array(plan.prompt.tokens[-1:])
        if plan.draft_tokens:
            return self._drafted(row, last, options)
        return _tokens_of(generate_step(last, self._parts.model, **options))

    def _drafted(self, row: Row, last: Any, options: dict[str, Any]) -> Tokens:
        """Tokens by speculative decoding, with the row's figures of it."""
        size = row.plan.draft_tokens
        steps: Any = speculative_generate_step(
            last, self._parts.model, self._parts.draft, num_draft_tokens=size, **options
        )
        has_round_ended = True
        try:
            for token, _, is_from_draft in steps:
                if has_round_ended:
                    row.drafted += min(size, row.plan.max_tokens - row.generated)
                row.accepted += is_from_draft
                has_round_ended = not is_from_draft
                yield int(token)
        finally:
            steps.close()


def _tokens_of(steps: Any) -> Tokens:
    try:
        for token, _ in steps:
            yield int(token)
    finally:
        steps.close()


def _with_history(processors: list[Any], history: list[int]) -> list[Processor]:
    """Processors that see the whole prompt; mlx-lm shows them what it was given to run."""
    if not processors:
        return []
    before = mx.array(history, mx.int32)

    def wrap(inner: Processor) -> Callable[[Any, Any], Any]:
        return lambda tokens, logits: inner(
            mx.concatenate([before, tokens.astype(mx.int32)]), logits
        )

    return [wrap(each) for each in processors]
