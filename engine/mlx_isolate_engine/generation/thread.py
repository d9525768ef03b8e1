"""The one thread that loads the model and generates: its life, its inbox and its loop."""

import asyncio
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_isolate_engine.completion.events import Placement
from mlx_isolate_engine.device import own_free_bytes
from mlx_isolate_engine.generation.continuous import ContinuousLane
from mlx_isolate_engine.generation.counters import Counters
from mlx_isolate_engine.generation.few_shapes import are_costly
from mlx_isolate_engine.generation.lane import Lane, LaneParts
from mlx_isolate_engine.generation.memory import room_for_rows
from mlx_isolate_engine.generation.outbox import Deliveries
from mlx_isolate_engine.generation.plan import EndKind
from mlx_isolate_engine.generation.ports import (
    Adapters,
    EntryKind,
    LoadAdapters,
    LoadedModel,
    LoadModel,
    MakePromptCache,
    PromptCache,
)
from mlx_isolate_engine.generation.rehearsal import REHEARSAL_S, is_worthwhile
from mlx_isolate_engine.generation.reuse import PrefixReuse
from mlx_isolate_engine.generation.row import ModelFamily
from mlx_isolate_engine.generation.serial import SerialLane
from mlx_isolate_engine.generation.suitability import (
    can_batch,
    check_draft,
    check_kv_bits,
    warm_up,
)
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_engine.unused_memory import give_back
from mlx_isolate_shared.clock import Clock, SystemClock
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import EngineError
from mlx_isolate_shared.wire import CacheFigures, Progress

log = logging.getLogger(__name__)

# Status of a process whose generation loop has failed: an engine that lives but cannot generate
# would be worse than none.
EXIT_GENERATION_FAILED = 70
# An engine without work for so long gives back what MLX and malloc keep for the next step. Sooner,
# it would do so between the turns of an agent.
REST_AFTER_S = 2.0

_Message = tuple[Literal["submit", "drop", "resume", "stop"], Ticket | None]


def end_process(error: BaseException) -> None:
    """Print the traceback and end the process at once, whatever other threads are doing."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(EXIT_GENERATION_FAILED)


class GenerationThread:
    """Owns the model, its MLX stream and every completion that is being generated.

    Args:
        settings: the engine's settings.
        load: loads model and tokenizer; called on the generation thread, since MLX streams
            belong to the thread that made them.
        load_draft: loads the draft model, after `load` and likewise; None = there is none.
        load_adapters: loads what completions may choose among, likewise; None = there is nothing.
        make_prompt_cache: called on the generation thread after the load; None = no prompt cache.
        on_failure: called on the generation thread with the error that ended its loop; the
            default prints the traceback and ends the process with status 70.
        rehearsal_s: how long a GPU may run shapes before it is ready.
        rest_after_s: seconds without work after which unused memory is given back.
        clock: for pacing and timings.
    """

    def __init__(
        self,
        settings: EngineSettings,
        load: LoadModel,
        *,
        load_draft: LoadModel | None = None,
        load_adapters: LoadAdapters | None = None,
        make_prompt_cache: MakePromptCache | None = None,
        on_failure: Callable[[BaseException], None] = end_process,
        rehearsal_s: float = REHEARSAL_S,
        rest_after_s: float = REST_AFTER_S,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._load = load
        self._load_draft = load_draft
        self._load_adapters = load_adapters
        self._adapters: Adapters | None = None
        self._make_prompt_cache = make_prompt_cache
        self._on_failure = on_failure
        self._rehearsal_s = rehearsal_s
        self._rest_after_s = rest_after_s
        self._clock = clock or SystemClock()
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._deliveries: Deliveries | None = None
        self._started: asyncio.Future[LoadedModel] | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._loaded: LoadedModel | None = None
        self._family: ModelFamily | None = None
        self._cache: PromptCache | None = None
        self._lanes: dict[Placement, Lane] = {}
        self._reuse: PrefixReuse | None = None
        self._end_error: EngineError | None = None
        self.counters = Counters()

    # -- event loop

    async def start(self) -> LoadedModel:
        """Start the thread on the running event loop; returns after load and warm-up pass.

        Raises what `load` raised.
        """
        assert self._started is None, "a generation thread starts once"
        loop = asyncio.get_running_loop()
        self._deliveries = Deliveries(loop)
        self._started = loop.create_future()
        self._stopped = loop.create_future()
        self._thread.start()
        return await self._started

    @property
    def loaded(self) -> LoadedModel:
        """The model; only after `start` has returned."""
        assert self._loaded is not None, "not started"
        return self._loaded

    @property
    def vocabulary_size(self) -> int:
        """Width of the model's output; only after `start` has returned."""
        assert self._family is not None, "not started"
        return self._family.vocabulary_size

    @property
    def marks_start_with_space(self) -> bool:
        """Whether the tokenizer writes a space before the first word of a text."""
        assert self._family is not None, "not started"
        return self._family.vocabulary.marks_start_with_space

    @property
    def checkpoint_kinds(self) -> frozenset[EntryKind]:
        """Which places inside a prompt the prompt cache has a use for."""
        return self._reuse.checkpoint_kinds if self._reuse is not None else frozenset()

    @property
    def placement(self) -> Placement:
        """The lane in which this engine's completions run; only after `start` has returned."""
        return "continuous" if "continuous" in self._lanes else "serial"

    @property
    def has_draft(self) -> bool:
        """Whether a draft model was loaded."""
        return self._load_draft is not None

    @property
    def adapters(self) -> Mapping[str, str]:
        """Names that completions may choose, with what their KV state depends on."""
        return self._adapters.digests if self._adapters is not None else {}

    def submit(self, ticket: Ticket) -> None:
        """Queue a completion; its outbox gets events and one end, unless it is given up first."""
        self.counters.submitted += 1
        self._inbox.put(("submit", ticket))
        if self._end_error is not None:
            self._refuse_rest(self._end_error)  # Nobody reads the inbox any more.

    def give_up(self, ticket: Ticket, kind: EndKind) -> None:
        """Stop a completion within one step or one piece of prefill; harmless after its end."""
        if ticket.give_up is None:
            ticket.give_up = kind
            self._inbox.put(("drop", ticket))

    def resume(self, ticket: Ticket) -> None:
        """Tell that the reader of a parked completion has caught up."""
        self._inbox.put(("resume", ticket))

    async def stop(self) -> None:
        """End the loop after the current step; completions still running fail."""
        if self._stopped is None:
            return
        self._inbox.put(("stop", None))
        await asyncio.shield(self._stopped)

    def progress(self) -> Progress:
        """Counters, MLX memory and cache figures now; the caller adds the process footprint.

        Callable from any thread, never blocks.
        """
        counters = self.counters
        return Progress(
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            active=counters.active,
            queued=counters.queued,
            completed=counters.completed,
            cancelled=counters.cancelled,
            failed=counters.failed,
            stalled=counters.stalled,
            mlx_active_bytes=mx.get_active_memory(),
            mlx_peak_bytes=mx.get_peak_memory(),
            mlx_cache_bytes=mx.get_cache_memory(),
            device_free_bytes=own_free_bytes(),
            cache=self._cache.figures() if self._cache is not None else CacheFigures(),
        )

    # -- generation thread

    def _run(self) -> None:
        assert self._deliveries is not None and self._started is not None
        try:
            self._prepare()
        except BaseException as error:  # noqa: BLE001 - the top frame of the thread
            self._deliveries.call(_set_exception, self._started, _as_failure(error))
            self._say_stopped()
            return
        self._deliveries.call(_set_result, self._started, self._loaded)
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - the top frame of the thread
            log.critical("generation.failed error=%s", type(error).__name__)
            self._end_all(EngineError("The engine failed.", status=502, code="engine_died"))
            self._say_stopped()
            self._on_failure(error)
            return
        self._end_all(EngineError("The engine is stopping.", status=503, code="engine_stopping"))
        self._give_back()
        self._say_stopped()

    def _end_all(self, error: EngineError) -> None:
        assert self._deliveries is not None
        self._deliveries.flush()
        for lane in self._lanes.values():
            lane.close(error)
        self._deliveries.flush()
        # In this order: what is submitted after the second line, its submitter refuses.
        self._end_error = error
        self._refuse_rest(error)

    def _refuse_rest(self, error: EngineError) -> None:
        """End what is still in the inbox; for either thread, after the loop has ended."""
        assert self._deliveries is not None
        while True:
            try:
                command, ticket = self._inbox.get_nowait()
            except queue.Empty:
                return
            if command == "submit" and ticket is not None:
                self.counters.count_end("failed")
                self._deliveries.call(ticket.outbox.deliver, [], error)

    def _prepare(self) -> None:
        assert self._deliveries is not None
        self._loaded = self._load()
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        empty = make_prompt_cache(model)
        check_kv_bits(self._settings, empty)
        draft: Any = None
        if self._load_draft is not None:
            loaded_draft = self._load_draft()
            check_draft(self._loaded, loaded_draft)
            draft = loaded_draft.model
        if self._load_adapters is not None:
            self._adapters = self._load_adapters(self._loaded)
        self._family = ModelFamily(tokenizer, warm_up(model, self._settings))
        if self._make_prompt_cache is not None:
            self._cache = self._make_prompt_cache(self._loaded)
        self._reuse = PrefixReuse(self._cache, empty, self._settings)
        parts = LaneParts(
            model=model,
            draft=draft,
            adapters=self._adapters,
            family=self._family,
            settings=self._settings,
            reuse=self._reuse,
            counters=self.counters,
            deliveries=self._deliveries,
            clock=self._clock,
        )
        if draft is None and can_batch(self._settings, empty):
            lane = ContinuousLane(parts, room_for_rows(model), few_shapes=are_costly())
            if is_worthwhile():
                lane.rehearse(self._loaded.facts.context_length, self._rehearsal_s)
            self._lanes["continuous"] = lane
        else:
            self._lanes["serial"] = SerialLane(parts)

    def _loop(self) -> None:
        assert self._deliveries is not None
        lanes = list(self._lanes.values())
        while self._take_messages():
            for lane in lanes:
                if lane.has_work():
                    lane.step()
            if not any(lane.flushes_soon() for lane in lanes):
                self._deliveries.flush()

    def _take_messages(self) -> bool:
        """Handle what has come in; waits only if there is nothing else to do. False = stop."""
        has_work = any(lane.has_work() for lane in self._lanes.values())
        if not has_work and self._inbox.empty():
            assert self._deliveries is not None
            self._deliveries.flush()
            self._set_idle(True)
            message = self._wait_at_rest()
            self._set_idle(False)
        elif self._inbox.empty():
            wait_s = min(lane.wait_s() for lane in self._lanes.values() if lane.has_work())
            if wait_s <= 0:
                return True
            try:
                message = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                return True
        else:
            message = self._inbox.get_nowait()
        while True:
            command, ticket = message
            if command == "stop":
                return False
            assert ticket is not None
            lane = self._lanes[ticket.plan.placement]
            match command:
                case "submit":
                    lane.submit(ticket)
                case "drop":
                    lane.drop(ticket)
                case "resume":
                    lane.resume(ticket)
            if self._inbox.empty():  # an exception for each step would cost more than the rest
                return True
            message = self._inbox.get_nowait()

    def _wait_at_rest(self) -> _Message:
        """The next message; where it does not come soon, unused memory is given back meanwhile.

        Again and again: the prompt cache's writer lets go of what it has written.
        """
        while True:
            try:
                return self._inbox.get(timeout=self._rest_after_s)
            except queue.Empty:
                if mx.get_cache_memory():
                    give_back()

    def _set_idle(self, idle: bool) -> None:
        if self._cache is not None:
            self._cache.set_idle(idle)

    def _give_back(self) -> None:
        """Let go of everything of MLX's on the thread that made it: else the exit aborts."""
        self._lanes.clear()
        self._loaded = self._family = self._cache = self._reuse = self._adapters = None
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    def _say_stopped(self) -> None:
        assert self._deliveries is not None and self._stopped is not None
        self._deliveries.call(_set_result, self._stopped, None)


def _as_failure(error: BaseException) -> Exception:
    """What ended a load, as something that a future takes and a caller catches.

    A model may bring code of its own: a StopIteration would leave the future waiting for ever, and
    what ends programs would end this one without a word.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
