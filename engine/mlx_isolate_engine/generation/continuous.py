"""The continuous lane: many completions in one batch of mlx-lm's BatchGenerator.

Owns which rows wait, run or are parked, and every call of the generator. Decides nothing about
text (row), order (admission) or step length (pacing).
"""

import logging
from collections.abc import Generator, Iterable
from itertools import pairwise
from typing import Any

import mlx.core as mx

from mlx_isolate_engine.completion.events import FinishReason
from mlx_isolate_engine.generation import admission
from mlx_isolate_engine.generation.batch_model import BatchModel
from mlx_isolate_engine.generation.endings import Endings
from mlx_isolate_engine.generation.lane import LaneParts
from mlx_isolate_engine.generation.layerwise import LayerwiseGenerator
from mlx_isolate_engine.generation.outbox import RESUME_SHARE
from mlx_isolate_engine.generation.pacing import PrefillPace
from mlx_isolate_engine.generation.plan import SamplingPlan
from mlx_isolate_engine.generation.ports import Adapters, EntryKind
from mlx_isolate_engine.generation.rehearsal import REHEARSAL_S, Rehearsal
from mlx_isolate_engine.generation.reuse import Found
from mlx_isolate_engine.generation.row import Row
from mlx_isolate_engine.generation.sharing import SharedPrefills
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_engine.generation.turns import Turns
from mlx_isolate_shared.errors import EngineError

log = logging.getLogger(__name__)

# Share of max_step_s that a step may spend on reading cached prefixes from disk.
RESTORE_SHARE = 0.3
# Who has come waits so long for those who are being prepared, to join with them: joining one by one
# costs everybody some passes of the model each time.
COALESCE_S = 0.025
# A piece of prefill longer than this waits until prompts that have just run have their first token.
HOLD_OVER_S = 0.01
# Steps in a row that prefill may wait so; without a limit a stream of chats would stop it.
HOLD_STEPS_MAX = 4


class Parked:
    """A row that was taken out of the batch: its cache, its tokens, and the one to run next.

    `since` is when it began to wait for its place, in seconds.
    """

    def __init__(self, row: Row, cache: list[Any], tokens: list[int], next_token: int) -> None:
        self.since = 0.0
        self.row = row
        self.cache = cache
        self.tokens = tokens
        self.next_token = next_token


class ContinuousLane:
    """Runs rows side by side.

    Args:
        parts: what it works with.
        room: memory for rows; None = not limited.
    """

    def __init__(self, parts: LaneParts, room: admission.Room | None) -> None:
        settings = parts.settings
        self._settings = settings
        self._family = parts.family
        self._reuse = parts.reuse
        self._counters = parts.counters
        self._deliveries = parts.deliveries
        self._clock = parts.clock
        self._endings = Endings("continuous", parts.counters, parts.deliveries)
        self._room = room
        self._rows_max = max(1, settings.decode_concurrency)
        self._prompts_max = max(1, min(settings.prompt_concurrency, self._rows_max))
        self._pace = PrefillPace(settings.max_step_s, settings.prefill_step_size)
        self._held = 0
        self._adapters = parts.adapters
        self._shared = SharedPrefills()
        self._turns = Turns(parts.clock.monotonic())
        self._generator = LayerwiseGenerator(
            BatchModel(parts.model, parts.deliveries.flush),
            stop_tokens=[[token] for token in sorted(parts.family.end_tokens)],
            completion_batch_size=self._rows_max,
            # Whatever admission has let in may prefill at once; admission keeps the limit.
            prefill_batch_size=self._rows_max,
            prefill_step_size=settings.prefill_step_size,
        )
        self._waiting: list[Row] = []
        self._restoring: list[tuple[Row, Generator[None, None, Found]]] = []
        self._prefilling: dict[int, Row] = {}
        self._decoding: dict[int, Row] = {}
        self._parked: dict[Ticket, Parked] = {}
        self._resuming: list[Parked] = []

    def rehearse(self, length_max: int, seconds_max: float = REHEARSAL_S) -> None:
        """Before anything else, on a GPU: run every shape once (see rehearsal.py).

        Args:
            length_max: tokens that the model takes.
            seconds_max: no pass begins after so long.
        """
        sampler = self._family.samplers.make(SamplingPlan(temperature=0.7, top_p=0.9))
        Rehearsal(self._generator, self._pace, sampler, self._clock).run(
            rows_max=self._rows_max, length_max=length_max, seconds_max=seconds_max
        )
        if self._pace.is_measured:
            # So that a restore can be weighed against a prefill from the first request on.
            step = self._pace.step_size
            self._reuse.note_prefill(step, self._pace.seconds(step))

    # -- what the thread asks and tells

    def has_work(self) -> bool:
        """See `Lane.has_work`."""
        running = self._prefilling or self._decoding or self._restoring
        return bool(running or self._waiting or self._resuming)

    def wait_s(self) -> float:
        """See `Lane.wait_s`."""
        if self._prefilling or self._decoding or self._restoring or self._resuming:
            return 0.0
        return self._company_due_s()

    def flushes_soon(self) -> bool:
        """See `Lane.flushes_soon`."""
        is_busy = self._prefilling or self._waiting or self._restoring or self._resuming
        if is_busy or not self._decoding:
            return False
        return all(row.generated > 1 for row in self._decoding.values())

    def _company_due_s(self) -> float:
        """How long those who wait should go on waiting for those who are being prepared."""
        if not self._counters.coming or len(self._waiting) >= self._prompts_max:
            return 0.0
        first = min((row.submitted_at for row in self._waiting), default=0.0)
        return max(0.0, first + COALESCE_S - self._clock.monotonic())

    def submit(self, ticket: Ticket) -> None:
        """See `Lane.submit`."""
        self._waiting.append(Row(ticket, self._family, self._clock))

    def resume(self, ticket: Ticket) -> None:
        """See `Lane.resume`."""
        parked = self._parked.pop(ticket, None)
        if parked is not None:
            ticket.is_parked = False
            self._put_in_line(parked)

    def drop(self, ticket: Ticket) -> None:
        """See `Lane.drop`; what its cache holds is kept."""
        if (waiting := _find(self._waiting, ticket)) is not None:
            self._waiting.remove(waiting)
        elif (restoring := self._pop_restoring(ticket)) is not None:
            self._counters.active -= 1
            restoring.close()
        elif (row := _find(self._prefilling.values(), ticket)) is not None:
            self._take_out(row, "partial")
        elif (row := _find(self._decoding.values(), ticket)) is not None:
            self._take_out(row, "assistant")
        elif (parked := self._pop_parked(ticket)) is not None:
            self._counters.active -= 1
            self._reuse.keep(parked.row, parked.tokens, parked.cache, "assistant")
        else:
            return  # It has ended by itself.
        self._endings.drop(ticket)

    def close(self, error: EngineError) -> None:
        """See `Lane.close`."""
        for _, restoring in self._restoring:
            restoring.close()
        for row in self._everybody():
            self._endings.refuse(row.ticket, error)
        self._counters.active = 0
        self._generator.close()

    @property
    def shared_prefills(self) -> int:
        """Prompts kept for further choices of their requests."""
        return len(self._shared)

    def _everybody(self) -> list[Row]:
        rows = [*self._waiting, *self._prefilling.values(), *self._decoding.values()]
        rows += [parked.row for parked in (*self._parked.values(), *self._resuming)]
        return [*rows, *(row for row, _ in self._restoring)]

    # -- one step

    def step(self) -> None:
        """Let rows in, run one decode step and one piece of prefill, and pass on what came."""
        if not self.flushes_soon():  # not any more: a message has changed what is to be done
            self._deliveries.flush()
        self._let_in()
        self._restore()
        before = self._clock.monotonic()
        self._generator.prefill_step_size = self._width()
        prompts, tokens = self._generator.next()
        if prompts:
            self._note_prompts(prompts, before)
        for response in tokens:
            self._note_token(response)

    def _width(self) -> int:
        """Tokens of each prompt that this step runs; 0 = prefill waits for first tokens."""
        lefts = [row.prompt_left - 1 for row in self._prefilling.values() if row.prompt_left > 1]
        if not lefts:
            self._held = 0
            return self._settings.prefill_step_size
        width = self._pace.width(max(lefts), len(lefts), is_quiet=not self._decoding)
        is_opening = len(lefts) < len(self._prefilling) or any(
            row.generated == 0 for row in self._decoding.values()
        )
        if (
            is_opening
            and self._held < HOLD_STEPS_MAX
            and self._pace.seconds(width * len(lefts)) > HOLD_OVER_S
        ):
            self._held += 1
            return 0
        self._held = 0
        return width

    def _let_in(self) -> None:
        if self._adapters is not None and not self._is_turn_on(self._adapters):
            return
        running = len(self._prefilling) + len(self._decoding) + len(self._restoring)
        for parked in [each for each in self._resuming if self._is_mounted(each.row)]:
            if running >= self._rows_max:
                break
            self._resuming.remove(parked)
            self._insert_parked(parked)
            running += 1
        if self._shared:
            self._shared.forget_ended(self._everybody())
        if not self._waiting or running >= self._rows_max or self._company_due_s() > 0:
            return
        for row in self._choose():
            self._counters.active += 1
            self._restoring.append((row, self._find(row)))

    def _find(self, row: Row) -> Generator[None, None, Found]:
        """What the row begins with: its sibling's prompt, or what the prompt cache has."""
        found = self._shared.take(row)
        if found is not None:
            return found
        return (yield from self._reuse.find(row))

    def _choose(self) -> list[Row]:
        """Take the rows that join now from those that wait."""
        running = [*self._prefilling.values(), *(row for row, _ in self._restoring)]
        lengths = (row.length for row in (*running, *self._decoding.values()))
        lefts = [row.prompt_left for row in running if row.prompt_left > 1]
        batch = admission.Batch(
            prefilling=lefts,
            decoding=len(self._decoding) + len(running) - len(lefts),
            longest=max(lengths, default=0),
            rows_max=self._rows_max,
            prompts_max=self._prompts_max,
            allowance=self._pace.allowance(is_quiet=not self._decoding),
            step_size=self._settings.prefill_step_size,
            room=self._room,
        )
        mounted = [row for row in self._waiting if self._is_mounted(row)]
        candidates = self._shared.candidates(mounted, [r for r in running if r.prompt_left > 1])
        waiters = [
            admission.Waiter(
                tokens=1 if self._shared.has(row) else row.prompt_left - self._reuse.expect(row),
                length=row.length,
                since=row.submitted_at,
            )
            for row in candidates
        ]
        chosen = admission.choose(waiters, batch, self._clock.monotonic())
        rows = [candidates[position] for position in chosen]
        self._waiting = [row for row in self._waiting if row not in rows]
        return rows

    # -- whose adapter is mounted

    def _is_mounted(self, row: Row) -> bool:
        return row.plan.adapter == self._turns.mounted

    def _is_turn_on(self, adapters: Adapters) -> bool:
        """Whether completions of the mounted adapter may join; mounts another when it is time."""
        waiting: dict[str | None, float] = {}
        for adapter, since in (
            *((row.plan.adapter, row.submitted_at) for row in self._waiting),
            *((parked.row.plan.adapter, parked.since) for parked in self._resuming),
        ):
            waiting[adapter] = min(since, waiting.get(adapter, since))
        running = self._prefilling or self._decoding or self._restoring
        decision, adapter = self._turns.decide(
            waiting, self._clock.monotonic(), is_running=bool(running)
        )
        if decision == "switch":
            adapters.mount(adapter)
        elif decision == "drain" and not self._prefilling and not self._restoring:
            for row in [each for each in self._decoding.values() if each.generated]:
                if (aside := self._set_aside(row)) is not None:
                    self._put_in_line(aside)
        return decision != "drain"

    def _put_in_line(self, parked: Parked) -> None:
        parked.since = self._clock.monotonic()
        self._resuming.append(parked)

    def _restore(self) -> None:
        """Look for cached prefixes; a long read from disk goes on in later steps."""
        deadline = self._clock.monotonic() + self._settings.max_step_s * RESTORE_SHARE
        while self._restoring:
            row, steps = self._restoring[0]
            try:
                next(steps)
            except StopIteration as end:
                del self._restoring[0]
                self._insert(row, end.value)
                continue
            if self._clock.monotonic() >= deadline:
                return

    def _insert(self, row: Row, found: Found) -> None:
        cache, reused = found
        prompt = row.plan.prompt
        ends = self._reuse.checkpoints(prompt, reused)
        row.checkpoints.extend(ends)
        row.start(reused)
        edges = [reused, *(each.end for each in ends), len(prompt.tokens)]
        segments = [prompt.tokens[a:b] for a, b in pairwise(edges)]
        caches: list[Any] = [cache]
        (row.uid,) = self._generator.insert_segments(
            [segments],
            max_tokens=[row.plan.max_tokens],
            caches=caches,
            all_tokens=[prompt.tokens[:reused]],
            samplers=[row.sampler],
            logits_processors=[row.processors],
        )
        self._prefilling[row.uid] = row

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
        ran: list[int] = []
        ended: list[int] = []
        for response in responses:
            row = self._prefilling[response.uid]
            if row.generated == 0:
                new, progress = row.note_prefill(response.progress[0])
                if new:
                    self._counters.prompt_tokens += new
                    self._deliveries.add(row.ticket.outbox, [progress])
                if not response.end_of_prompt:  # that one token runs as a decode step
                    ran.append(new)
            if response.end_of_prompt:
                self._decoding[response.uid] = self._prefilling.pop(response.uid)
            elif response.end_of_segment and row.checkpoints:
                ended.append(response.uid)
        if any(ran):
            seconds = self._clock.monotonic() - before
            self._pace.observe(len(ran), max(ran), seconds)
            self._reuse.note_prefill(sum(ran), seconds)
        if ended:
            self._keep_checkpoints(ended)

    def _keep_checkpoints(self, uids: list[int]) -> None:
        """Prompts have run to their checkpoints: leave the state to later prompts and siblings."""
        reached = {uid: self._prefilling[uid].checkpoints.popleft() for uid in uids}
        shared = {
            uid
            for uid, checkpoint in reached.items()
            if self._shared.is_wanted(self._prefilling[uid], checkpoint.end)
        }
        kinds = self._reuse.checkpoint_kinds
        wanted = [uid for uid in uids if uid in shared or reached[uid].kind in kinds]
        if not wanted:
            return
        for uid, (cache, tokens) in self._generator.extract_cache(wanted).items():
            row = self._prefilling[uid]
            self._reuse.keep_checkpoint(row, tokens, cache, reached[uid].kind)
            if uid in shared:
                self._shared.keep(row, cache, len(tokens))

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
        self._endings.complete(row, reason)
        self._deliveries.flush()  # nobody should wait for what is kept for later prompts
        if response.finish_reason is None:  # a stop string: only we know of it
            self._take_out(row, "assistant")
            return
        del self._decoding[row.uid]
        self._reuse.keep(row, response.all_tokens, response.prompt_cache, "assistant")
        self._counters.active -= 1  # last: an engine at rest has kept everything

    def _fail(self, row: Row, response: Any, error: Exception) -> None:
        """One row has failed; nothing of it is kept, and its neighbours go on."""
        self._counters.active -= 1
        del self._decoding[row.uid]
        if response.finish_reason is None:
            self._generator.remove([row.uid])
        self._endings.fail(row.ticket, error)

    def _take_out(self, row: Row, kind: EntryKind) -> None:
        """Take a row out of the batch before its end, and keep what its cache holds."""
        self._prefilling.pop(row.uid, None)
        self._decoding.pop(row.uid, None)
        if self._reuse.is_on:
            cache, tokens = self._generator.remove([row.uid], return_prompt_caches=True)[row.uid]
            self._reuse.keep(row, tokens, cache, kind)
        else:
            self._generator.remove([row.uid])
        self._counters.active -= 1

    # -- rows whose readers have stopped

    def _park(self, row: Row) -> None:
        """Take a row out whose reader has stopped, with all that is needed to go on later."""
        parked = self._set_aside(row)
        if parked is None:
            return
        log.info("completion.parked request=%s", row.plan.request_id)
        self._parked[row.ticket] = parked
        row.ticket.is_parked = True
        # The reader may have caught up just before it could see that the row is parked.
        if row.ticket.outbox.unread_bytes <= self._settings.stall_buffer_bytes * RESUME_SHARE:
            self.resume(row.ticket)

    def _set_aside(self, row: Row) -> Parked | None:
        """Take a row that generates out of the batch; None if it has ended with that.

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
            self._endings.fail(row.ticket, advance.error)
            return None
        self._deliveries.add(row.ticket.outbox, advance.events)
        if advance.reason is not None:
            self._counters.active -= 1
            self._reuse.keep(row, tokens, cache, "assistant")
            self._endings.complete(row, advance.reason)
            return None
        return Parked(row, cache, list(tokens), next_token)

    def _pop_parked(self, ticket: Ticket) -> Parked | None:
        parked = self._parked.pop(ticket, None)
        if parked is None:
            parked = next((each for each in self._resuming if each.row.ticket is ticket), None)
            if parked is not None:
                self._resuming.remove(parked)
        return parked

    def _pop_restoring(self, ticket: Ticket) -> Generator[None, None, Found] | None:
        for position, (row, steps) in enumerate(self._restoring):
            if row.ticket is ticket:
                del self._restoring[position]
                return steps
        return None


def _find(rows: Iterable[Row], ticket: Ticket) -> Row | None:
    return next((row for row in rows if row.ticket is ticket), None)
