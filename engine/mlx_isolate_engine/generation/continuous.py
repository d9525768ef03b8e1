"""The continuous lane: many completions in one batch of mlx-lm's BatchGenerator.

Owns which rows are in the batch, and every call of the generator. Decides nothing about text (row),
who comes in (entrance) or step length (pacing).
"""

import logging
from itertools import pairwise
from typing import Any

import mlx.core as mx

from mlx_isolate_engine.generation import admission
from mlx_isolate_engine.generation.batch_model import BatchModel
from mlx_isolate_engine.generation.endings import Endings
from mlx_isolate_engine.generation.entrance import Entrance
from mlx_isolate_engine.generation.lane import LaneParts
from mlx_isolate_engine.generation.layerwise import LayerwiseGenerator
from mlx_isolate_engine.generation.outbox import RESUME_SHARE
from mlx_isolate_engine.generation.pacing import PrefillPace
from mlx_isolate_engine.generation.parking import Parked, Parking
from mlx_isolate_engine.generation.plan import SamplingPlan
from mlx_isolate_engine.generation.ports import Adapters, EntryKind
from mlx_isolate_engine.generation.rehearsal import REHEARSAL_S, Rehearsal
from mlx_isolate_engine.generation.reuse import Found
from mlx_isolate_engine.generation.row import Row, row_of
from mlx_isolate_engine.generation.sharing import SharedPrefills
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_engine.generation.turns import Turns
from mlx_isolate_shared.errors import EngineError

log = logging.getLogger(__name__)

# A piece of prefill longer than this waits until prompts that have just run have their first token.
HOLD_OVER_S = 0.01
# Steps in a row that prefill may wait so; without a limit a stream of chats would stop it.
HOLD_STEPS_MAX = 4


class ContinuousLane:
    """Runs rows side by side.

    Args:
        parts: what it works with.
        room: memory for rows; None = not limited.
        few_shapes: as `BatchModel` takes it.
    """

    def __init__(self, parts: LaneParts, room: admission.Room | None, few_shapes: bool) -> None:
        settings = parts.settings
        self._settings = settings
        self._family = parts.family
        self._reuse = parts.reuse
        self._counters = parts.counters
        self._deliveries = parts.deliveries
        self._clock = parts.clock
        self._endings = Endings("continuous", parts.counters, parts.deliveries)
        self._rows_max = max(1, settings.decode_concurrency)
        self._pace = PrefillPace(settings.max_step_s, settings.prefill_step_size)
        self._held = 0
        self._adapters = parts.adapters
        self._shared = SharedPrefills()
        self._entrance = Entrance(parts, self._pace, self._shared, room)
        self._parking = Parking(parts.clock)
        self._turns = Turns(parts.clock.monotonic())
        self._generator = LayerwiseGenerator(
            BatchModel(parts.model, parts.deliveries.flush, few_shapes=few_shapes),
            stop_tokens=[[token] for token in sorted(parts.family.end_tokens)],
            completion_batch_size=self._rows_max,
            # Whatever admission has let in may prefill at once; admission keeps the limit.
            prefill_batch_size=self._rows_max,
            prefill_step_size=settings.prefill_step_size,
        )
        self._prefilling: dict[int, Row] = {}
        self._decoding: dict[int, Row] = {}

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
        running = self._prefilling or self._decoding or self._entrance.restoring
        return bool(running or self._entrance.waiting or self._parking.resuming)

    def wait_s(self) -> float:
        """See `Lane.wait_s`."""
        running = self._prefilling or self._decoding or self._entrance.restoring
        if running or self._parking.resuming:
            return 0.0
        return self._entrance.company_due_s()

    def flushes_soon(self) -> bool:
        """See `Lane.flushes_soon`."""
        entrance = self._entrance
        is_busy = (
            self._prefilling or entrance.waiting or entrance.restoring or self._parking.resuming
        )
        if is_busy or len(self._decoding) < 2:
            # What one row has to tell is told while the next step is dispatched, if it is handed
            # over before it; later, the loop would still hold the interpreter when that is done.
            return False
        return all(row.generated > 1 for row in self._decoding.values())

    def submit(self, ticket: Ticket) -> None:
        """See `Lane.submit`."""
        self._entrance.waiting.append(Row(ticket, self._family, self._clock))

    def resume(self, ticket: Ticket) -> None:
        """See `Lane.resume`."""
        self._parking.resume(ticket)

    def drop(self, ticket: Ticket) -> None:
        """See `Lane.drop`; what its cache holds is kept."""
        if self._entrance.drop(ticket) or self._give_up(ticket):
            self._endings.drop(ticket)
            self._forget_shared()

    def _give_up(self, ticket: Ticket) -> bool:
        """Take a row out of the batch, or from beside it; False where it has ended by itself."""
        if (row := row_of(self._prefilling.values(), ticket)) is not None:
            self._take_out(row, "partial")
        elif (row := row_of(self._decoding.values(), ticket)) is not None:
            self._take_out(row, "assistant")
        elif (parked := self._parking.pop(ticket)) is not None:
            self._counters.active -= 1
            self._reuse.keep(parked.row, parked.tokens, parked.cache, "assistant")
        else:
            return False
        return True

    def close(self, error: EngineError) -> None:
        """See `Lane.close`."""
        self._entrance.close()
        for row in self._everybody():
            self._endings.refuse(row.ticket, error)
        self._counters.active = 0
        self._generator.close()

    def _everybody(self) -> list[Row]:
        in_batch = [*self._prefilling.values(), *self._decoding.values()]
        return [*self._entrance.rows, *in_batch, *self._parking.rows]

    def _forget_shared(self) -> None:
        """At once: there may be no next step for hours."""
        if self._shared:
            self._shared.forget_ended(self._everybody())

    # -- one step

    def step(self) -> None:
        """Let rows in, run one decode step and one piece of prefill, and pass on what came."""
        if not self.flushes_soon():  # not any more: a message has changed what is to be done
            self._deliveries.flush()
        if not self._entrance.shuts(self._prefilling.values(), self._generator):
            self._let_in()
            for row, found in self._entrance.restored():
                self._insert(row, found)
        before = self._clock.monotonic()
        self._generator.prefill_step_size = self._width()
        prompts, tokens = self._generator.next()
        if prompts:
            self._note_prompts(prompts, before)
        ended = [(one, each) for each in tokens if (one := self._note_token(each)) is not None]
        if ended:  # nobody should wait for what is kept for later prompts
            self._deliveries.flush()
        for one, response in ended:
            self._leave(one, response)
        self._forget_shared()

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
        entrance, parking = self._entrance, self._parking
        prefilling, decoding = self._prefilling.values(), self._decoding.values()
        for parked in [each for each in parking.resuming if self._is_mounted(each.row)]:
            if not entrance.takes_back(parked.row, prefilling, decoding):
                return  # nobody goes before it
            parking.resuming.remove(parked)
            self._insert_parked(parked)
        running = len(prefilling) + len(decoding) + len(entrance.restoring)
        if not entrance.waiting or running >= self._rows_max or entrance.company_due_s() > 0:
            return
        entrance.let_in(prefilling, decoding, self._turns.mounted)

    # -- whose adapter is mounted

    def _is_mounted(self, row: Row) -> bool:
        return row.plan.adapter == self._turns.mounted

    def _is_turn_on(self, adapters: Adapters) -> bool:
        """Whether completions of the mounted adapter may join; mounts another when it is time."""
        waiting: dict[str | None, float] = {}
        for adapter, since in (
            *((row.plan.adapter, row.submitted_at) for row in self._entrance.waiting),
            *((parked.row.plan.adapter, parked.since) for parked in self._parking.resuming),
        ):
            waiting[adapter] = min(since, waiting.get(adapter, since))
        running = self._prefilling or self._decoding or self._entrance.restoring
        decision, adapter = self._turns.decide(
            waiting, self._clock.monotonic(), is_running=bool(running)
        )
        if decision == "switch":
            adapters.mount(adapter)
        elif decision == "drain" and not self._prefilling and not self._entrance.restoring:
            for row in [each for each in self._decoding.values() if each.generated]:
                if (aside := self._set_aside(row)) is not None:
                    self._parking.put_in_line(aside)
        return decision != "drain"

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

    def _note_token(self, response: Any) -> Row | None:
        """Pass a token on; the row if it has ended by itself."""
        row = self._decoding[response.uid]
        self._counters.generated_tokens += 1
        advance = row.take_token(response.token)
        if advance.error is not None:
            self._fail(row, response, advance.error)
            return None
        self._deliveries.add(row.ticket.outbox, advance.events)
        if advance.reason is not None:
            self._endings.complete(row, advance.reason)
            del self._decoding[row.uid]
            return row
        if row.ticket.outbox.unread_bytes > self._settings.stall_buffer_bytes:
            self._park(row)
        return None

    def _leave(self, row: Row, response: Any) -> None:
        """A row that has ended leaves its cache to later prompts."""
        if response.finish_reason is None:  # a stop string: only we know of it
            self._take_out(row, "assistant")
        else:
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
        if self._reuse.is_on and row.has_run:
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
        self._parking.park(parked)
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
