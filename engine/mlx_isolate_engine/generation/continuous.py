"""The continuous lane: many completions in one batch of mlx-lm's BatchGenerator.

Owns which rows wait, run or are parked, and every call of the generator. Decides nothing about
text (row), order (admission) or step length (pacing).
"""

import logging
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from mlx_isolate_engine.completion.events import FinishReason
from mlx_isolate_engine.generation import admission
from mlx_isolate_engine.generation.counters import Counters
from mlx_isolate_engine.generation.outbox import Deliveries
from mlx_isolate_engine.generation.pacing import PrefillPace
from mlx_isolate_engine.generation.plan import Checkpoint, EndKind
from mlx_isolate_engine.generation.ports import EntryKind, PromptCache
from mlx_isolate_engine.generation.row import ModelFamily, Row
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_shared.clock import Clock
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import EngineError

log = logging.getLogger(__name__)

# A parked row comes back when its reader has worked off so much of its buffer; coming back at the
# first byte would park it again at once.
RESUME_SHARE = 0.5


class Parked:
    """A row that was taken out of the batch: its cache, its tokens, and the one to run next."""

    def __init__(self, row: Row, cache: list[Any], tokens: list[int], next_token: int) -> None:
        self.row = row
        self.cache = cache
        self.tokens = tokens
        self.next_token = next_token


class ContinuousLane:
    """Runs rows side by side; every method belongs to the generation thread.

    Args:
        model: mlx_lm's model.
        family: its shared parts.
        settings: concurrency, step sizes and the stall buffer.
        prompt_cache: prefixes to reuse; None = every prompt runs in full.
        counters: told what happens.
        deliveries: takes events and ends.
        clock: for pacing and timings.
    """

    def __init__(
        self,
        model: Any,
        family: ModelFamily,
        settings: EngineSettings,
        prompt_cache: PromptCache | None,
        counters: Counters,
        deliveries: Deliveries,
        clock: Clock,
    ) -> None:
        self._model = model
        self._family = family
        self._settings = settings
        self._cache = prompt_cache
        self._counters = counters
        self._deliveries = deliveries
        self._clock = clock
        self._rows_max = max(1, settings.decode_concurrency)
        self._prompts_max = max(1, min(settings.prompt_concurrency, self._rows_max))
        self._pace = PrefillPace(
            settings.max_step_s, settings.prefill_step_size * self._prompts_max
        )
        self._generator = BatchGenerator(
            model,
            stop_tokens=[[token] for token in sorted(family.end_tokens)],
            completion_batch_size=self._rows_max,
            # Whatever admission has let in may prefill at once; admission keeps the limit.
            prefill_batch_size=self._rows_max,
            prefill_step_size=settings.prefill_step_size,
        )
        self.wants_checkpoints = prompt_cache is not None and prompt_cache.wants_checkpoint(
            make_prompt_cache(model)
        )
        self.padded_tokens_max: int | None = None
        self._waiting: list[Row] = []
        self._prefilling: dict[int, Row] = {}
        self._decoding: dict[int, Row] = {}
        self._parked: dict[Ticket, Parked] = {}
        self._resuming: list[Parked] = []

    # -- what the thread asks and tells

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._prefilling or self._decoding or self._resuming)

    def submit(self, ticket: Ticket) -> None:
        """A new completion waits for its turn."""
        if ticket.give_up is not None:
            self._end(ticket, ticket.give_up)
            return
        self._waiting.append(Row(ticket, self._family, self._clock))

    def resume(self, ticket: Ticket) -> None:
        """The reader of a parked row has caught up."""
        parked = self._parked.pop(ticket, None)
        if parked is not None:
            ticket.is_parked = False
            self._resuming.append(parked)

    def drop(self, ticket: Ticket) -> None:
        """Take a completion out, in whatever phase it is; its partial cache is kept."""
        kind = ticket.give_up or "cancelled"
        if (waiting := _find(self._waiting, ticket)) is not None:
            self._waiting.remove(waiting)
        elif (row := _find(self._prefilling.values(), ticket)) is not None:
            self._take_out(row, "partial")
        elif (row := _find(self._decoding.values(), ticket)) is not None:
            self._take_out(row, "assistant")
        elif (parked := self._pop_parked(ticket)) is not None:
            self._counters.active -= 1
            self._keep(parked.row, parked.tokens, parked.cache, "assistant")
        else:
            return  # It has ended by itself.
        self._end(ticket, kind)

    def close(self, error: EngineError) -> None:
        """End everything with `error` and give the generator back."""
        tickets = [row.ticket for row in self._waiting]
        tickets += [row.ticket for row in (*self._prefilling.values(), *self._decoding.values())]
        tickets += [parked.row.ticket for parked in (*self._parked.values(), *self._resuming)]
        for ticket in tickets:
            self._deliveries.end(ticket.outbox, error)
            self._counters.count_end("failed")
        self._counters.active = 0
        self._generator.close()

    # -- one step

    def step(self) -> None:
        """Let rows in, run one decode step and one piece of prefill, and pass on what came."""
        self._let_in()
        before = self._clock.monotonic()
        rows = len(self._prefilling)
        share = min(self._pace.row_share(rows), self._settings.prefill_step_size)
        self._generator.prefill_step_size = share
        prompts, tokens = self._generator.next()
        if prompts:
            self._note_prompts(prompts, before)
        for response in tokens:
            self._note_token(response)

    def _let_in(self) -> None:
        free = self._rows_max - len(self._prefilling) - len(self._decoding)
        while self._resuming and free > 0:
            self._insert_parked(self._resuming.pop(0))
            free -= 1
        if not self._waiting:
            return
        batch = admission.Batch(
            prefilling=[row.prompt_left for row in self._prefilling.values()],
            decoding=len(self._decoding),
            longest=self._longest(),
            rows_max=self._rows_max,
            prompts_max=self._prompts_max,
            allowance=self._pace.allowance,
            padded_tokens_max=self.padded_tokens_max,
        )
        waiters = [
            admission.Waiter(tokens=row.prompt_left, length=row.length, since=row.submitted_at)
            for row in self._waiting
        ]
        chosen = admission.choose(waiters, batch, self._clock.monotonic())
        joining = [self._waiting[position] for position in chosen]
        for position in sorted(chosen, reverse=True):
            del self._waiting[position]
        for row in joining:
            self._insert(row)

    def _longest(self) -> int:
        rows = (*self._prefilling.values(), *self._decoding.values())
        return max((row.length for row in rows), default=0)

    def _insert(self, row: Row) -> None:
        prompt, reused, cache = row.plan.prompt, 0, None
        if self._cache is not None:
            cache, reused = self._cache.take(prompt.tokens, row.plan.namespace)
        ends = self._checkpoints(row, reused)
        row.checkpoints.extend(ends)
        row.start(reused)
        begins = [reused, *(each.end for each in ends)]
        segments = [
            prompt.tokens[begin:end]
            for begin, end in zip(begins, [*begins[1:], len(prompt.tokens)], strict=True)
        ]
        caches: list[Any] = [cache]
        (row.uid,) = self._generator.insert_segments(
            [segments],
            max_tokens=[row.plan.max_tokens],
            caches=caches,
            all_tokens=[prompt.tokens[:reused]],
            samplers=[row.sampler],
            logits_processors=[row.processors],
        )
        self._counters.active += 1
        self._prefilling[row.uid] = row

    def _checkpoints(self, row: Row, reused: int) -> list[Checkpoint]:
        """Where the prefill pauses: asked-for places, and always before the last token."""
        prompt = row.plan.prompt
        last = len(prompt.tokens) - 1
        ends = [each for each in prompt.checkpoints if reused < each.end < last]
        if not self.wants_checkpoints:
            ends = []
        if last > reused:
            ends.append(Checkpoint(end=last, kind="prompt"))
        return ends

    def _insert_parked(self, parked: Parked) -> None:
        row = parked.row
        (row.uid,) = self._generator.insert_segments(
            [[[parked.next_token]]],
            max_tokens=[row.plan.max_tokens - row.generated],
            caches=[parked.cache],
            all_tokens=[parked.tokens],
            samplers=[row.sampler],
            logits_processors=[row.processors],
        )
        self._prefilling[row.uid] = row

    # -- what came out of it

    def _note_prompts(self, responses: list[Any], before: float) -> None:
        ran = [0]
        ended: list[int] = []
        for response in responses:
            row = self._prefilling[response.uid]
            if row.generated == 0:
                new, progress = row.note_prefill(response.progress[0])
                ran.append(new)
                self._deliveries.add(row.ticket.outbox, [progress])
            if response.end_of_prompt:
                self._decoding[response.uid] = self._prefilling.pop(response.uid)
            elif response.end_of_segment and row.checkpoints:
                ended.append(response.uid)
        self._counters.prompt_tokens += sum(ran)
        running = sum(1 for response in responses if not response.end_of_prompt)
        seconds = self._clock.monotonic() - before
        self._pace.observe(max(ran) * running, seconds)
        if self._cache is not None and running:
            self._cache.note_prefill(sum(ran), seconds)
        if ended:
            self._keep_checkpoints(ended)

    def _keep_checkpoints(self, uids: list[int]) -> None:
        kinds: dict[int, EntryKind] = {
            uid: self._prefilling[uid].checkpoints.popleft().kind for uid in uids
        }
        if self._cache is None or not self.wants_checkpoints:
            return
        for uid, (cache, tokens) in self._generator.extract_cache(uids).items():
            self._keep(self._prefilling[uid], tokens, cache, kinds[uid])

    def _note_token(self, response: Any) -> None:
        row = self._decoding[response.uid]
        self._counters.generated_tokens += 1
        advance = row.take_token(response.token)
        if advance.error is not None:
            self._fail(row, response, advance.error)
            return
        self._deliveries.add(row.ticket.outbox, advance.events)
        if advance.reason is not None:
            self._finish(row, response, advance.reason)
        elif row.ticket.outbox.unread_bytes > self._settings.stall_buffer_bytes:
            self._park(row)

    def _finish(self, row: Row, response: Any, reason: FinishReason) -> None:
        if response.finish_reason is None:  # a stop string: only we know of it
            self._take_out(row, "assistant")
        else:
            self._counters.active -= 1
            del self._decoding[row.uid]
            self._keep(row, response.all_tokens, response.prompt_cache, "assistant")
        self._complete(row, reason)

    def _complete(self, row: Row, reason: FinishReason) -> None:
        self._deliveries.end(row.ticket.outbox, row.summary(reason, "continuous"))
        self._counters.count_end("completed")

    def _take_out(self, row: Row, kind: EntryKind) -> None:
        """Take a row out of the batch before its end, and keep what its cache holds."""
        self._counters.active -= 1
        self._prefilling.pop(row.uid, None)
        self._decoding.pop(row.uid, None)
        if self._cache is None:
            self._generator.remove([row.uid])
            return
        cache, tokens = self._generator.remove([row.uid], return_prompt_caches=True)[row.uid]
        if tokens:
            self._keep(row, tokens, cache, kind)

    def _keep(self, row: Row, tokens: list[int], cache: list[Any], kind: EntryKind) -> None:
        if self._cache is not None:
            self._cache.put(tokens, cache, row.plan.namespace, kind)

    def _park(self, row: Row) -> None:
        """Take a row out whose reader has stopped, with all that is needed to go on later.

        The generator runs one token ahead: that token is drawn, so it is this row's next one, and
        it is taken now. (It is the one thing that mlx-lm does not hand out with the cache.)
        """
        batch: Any = self._generator._generation_batch  # pyright: ignore[reportPrivateUsage]
        next_token = int(batch._next_tokens[batch.uids.index(row.uid)].item())
        cache, tokens = self._generator.remove([row.uid], return_prompt_caches=True)[row.uid]
        mx.eval([part.state for part in cache])
        del self._decoding[row.uid]
        self._counters.generated_tokens += 1
        advance = row.take_token(next_token)
        if advance.error is not None:
            self._counters.active -= 1
            self._end_failed(row.ticket, advance.error)
            return
        self._deliveries.add(row.ticket.outbox, advance.events)
        if advance.reason is not None:
            self._counters.active -= 1
            self._keep(row, tokens, cache, "assistant")
            self._complete(row, advance.reason)
            return
        log.info("completion.parked request=%s", row.plan.request_id)
        self._parked[row.ticket] = Parked(row, cache, list(tokens), next_token)
        row.ticket.is_parked = True
        # The reader may have caught up just before it could see that the row is parked.
        if row.ticket.outbox.unread_bytes <= self._settings.stall_buffer_bytes * RESUME_SHARE:
            self.resume(row.ticket)

    def _pop_parked(self, ticket: Ticket) -> Parked | None:
        parked = self._parked.pop(ticket, None)
        if parked is None:
            parked = next((each for each in self._resuming if each.row.ticket is ticket), None)
            if parked is not None:
                self._resuming.remove(parked)
        return parked

    def _fail(self, row: Row, response: Any, error: Exception) -> None:
        """One row has failed; nothing of it is kept, and its neighbours go on."""
        self._counters.active -= 1
        del self._decoding[row.uid]
        if response.finish_reason is None:
            self._generator.remove([row.uid])
        self._end_failed(row.ticket, error)

    def _end_failed(self, ticket: Ticket, error: Exception) -> None:
        log.error("completion.failed request=%s", ticket.plan.request_id, exc_info=error)
        message = "Generation of this completion failed inside the engine."
        failure = EngineError(message, status=500, code="generation_failed", retry_after_s=None)
        self._deliveries.end(ticket.outbox, failure)
        self._counters.count_end("failed")

    def _end(self, ticket: Ticket, kind: EndKind) -> None:
        """Count an end that nobody waits for: its reader has gone or has been given up."""
        self._counters.count_end(kind)
        log.info("completion.%s request=%s", kind, ticket.plan.request_id)


def _find(rows: Iterable[Row], ticket: Ticket) -> Row | None:
    return next((row for row in rows if row.ticket is ticket), None)
