"""One drill at work: the daemon it is done to, its own clients, and its record.

Owns the waiting: whatever a drill waits for has a deadline, and missing it breaks a promise.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import psutil

from mlx_isolate_supervisor.drills.polling import poll, poll_answer
from mlx_isolate_supervisor.drills.prober import Prober
from mlx_isolate_supervisor.drills.processes import child_of
from mlx_isolate_supervisor.drills.record import Broken, Record
from mlx_isolate_supervisor.drills.throwaway import OwnDaemon
from mlx_isolate_supervisor.drills.traffic import ENDLESS, Client, Seen
from mlx_isolate_supervisor.drills.watch import Watch, entered
from mlx_isolate_supervisor.telemetry.status import ModelStatus, Status

T = TypeVar("T")

# A load of a large model from a cold disk, or the demo's first conversion.
LOAD_DEADLINE_S = 1800.0
# For what ought to take a moment.
MOMENT_S = 30.0
# How much longer than before a model may take where its own time is more than a moment.
SLOWER_MAX = 5.0
# A standby imports and reads a tokenizer; after this the drill goes on without it.
STANDBY_DEADLINE_S = 60.0
# Answers that are shown of those that did not come to their end.
SHOWN_MAX = 3


def patience_s(measured_s: float) -> float:
    """How long to wait for what took `measured_s` seconds before: never less than a moment."""
    return max(MOMENT_S, SLOWER_MAX * measured_s)


class Scene:
    """What a drill is done with.

    Args:
        record: gathers what happens.
        client: requests to the daemon.
        own: the daemon itself, where it is a throw-away one.
        model: which model; None = the first.

    Attributes:
        act_at: when the drill's act was, by time.monotonic().
        answer_s: how long to wait for an answer, by the streams before the act.
    """

    def __init__(
        self, record: Record, client: Client, own: OwnDaemon | None, model: str | None
    ) -> None:
        self.record = record
        self.client = client
        self.watch = Watch(client)
        self.prober = Prober(client.url)
        self.act_at = time.monotonic()
        self._act_wall = time.time()
        self._own = own
        self._model = model
        self.model_id = model or ""
        self.answer_s = MOMENT_S

    @property
    def own(self) -> OwnDaemon:
        """The throw-away daemon; only for drills that ask for one."""
        assert self._own is not None
        return self._own

    @property
    def own_flags(self) -> tuple[str, ...]:
        """What the throw-away daemon was started with; empty for another daemon."""
        return self._own.all_flags if self._own is not None else ()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator["Scene"]:
        """Wait until the model is ready, then watch and probe until the end."""
        await self.find_model()
        try:
            await self.wait("served", "the event stream opens", self.watch.open())
            self.prober.start()
            yield self
        finally:
            await asyncio.to_thread(self.prober.stop)
            await self.watch.close()

    async def find_model(self) -> None:
        """Make sure that the model under drill has an engine that serves."""
        status = await self.status()
        model = status.models[0] if self._model is None else _named(status, self._model)
        self.model_id = model.id
        if model.state != "ready":
            await self.load()

    async def load(self) -> None:
        """Load the model, waiting as long as that takes."""
        code, answer = await self.wait(
            "served",
            f"{self.model_id} is loaded",
            self.client.post("/models/load", {"model": self.model_id}),
            LOAD_DEADLINE_S,
        )
        if code != 200:
            raise Broken("served", f"{self.model_id} does not load: {_message(answer)}")

    async def pardon(self) -> None:
        """Let the daemon forget the crashes of this drill: the next respawn is to come at once.

        Raises:
            Broken: it does not answer.
        """
        for model in (await self.status()).models:
            await self.reset(model.id)

    async def reset(self, model_id: str) -> None:
        """Let the daemon forget the crashes of one model.

        Raises:
            Broken: it does not answer.
        """
        asked = self.client.post("/models/reset", {"model": model_id})
        await self.wait("served", f"a reset of {model_id}", asked)

    # Looking

    async def status(self) -> Status:
        """The daemon's status."""
        return msgspec.json.decode(await self.client.get("/status"), type=Status)

    async def model(self) -> ModelStatus:
        """The status of the model under drill."""
        return _named(await self.status(), self.model_id)

    async def engine(self) -> psutil.Process:
        """The engine of the model under drill, verified as a child of its supervisor."""
        status = await self.status()
        return child_of(status.supervisor.pid, _named(status, self.model_id).pid)

    # Waiting

    async def wait(
        self, promise: str, what: str, awaited: Awaitable[T], deadline_s: float = MOMENT_S
    ) -> T:
        """Await it; past the deadline `promise` is broken.

        Raises:
            Broken: the deadline passed.
        """
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                return await awaited
        except TimeoutError:
            if not limit.expired():
                raise
            raise Broken(promise, f"not within {deadline_s:g} s: {what}") from None

    async def until(
        self,
        promise: str,
        what: str,
        holds: Callable[[ModelStatus], bool],
        deadline_s: float = MOMENT_S,
    ) -> ModelStatus:
        """Ask for the model's status until `holds`.

        Raises:
            Broken: the deadline passed.
        """
        return await self.wait(promise, what, poll_answer(self.model, holds), deadline_s)

    async def event(
        self,
        promise: str,
        state: str,
        *,
        after: int,
        deadline_s: float = MOMENT_S,
    ) -> dict[str, Any]:
        """The event of the model's entering `state`, by incarnation `after` or a later one.

        Raises:
            Broken: the deadline passed, or the model has failed.
        """
        wanted = entered(self.model_id, (state, "failed"), after)
        found = await self.wait(promise, f"state {state}", self.watch.wait(wanted), deadline_s)
        if found["after"] != state:
            raise Broken(promise, f"the model has failed: {found.get('message')}")
        return found

    async def standby_prepared(self) -> set[int]:
        """Wait until the spare engines are prepared; the pids of those prepared for this model."""

        def prepared(status: Status) -> bool:
            spares = status.supervisor.standbys
            # Beside other models they may be meant for one of those.
            is_alone = len(status.models) == 1
            return all(
                spare.is_prepared and (not is_alone or spare.model == self.model_id)
                for spare in spares
            )

        try:
            async with asyncio.timeout(STANDBY_DEADLINE_S):
                status = await poll_answer(self.status, prepared)
        except TimeoutError:
            return set()
        spares = status.supervisor.standbys
        return {spare.pid for spare in spares if spare.model == self.model_id}

    # Acting

    def act(self, text: str) -> None:
        """The drill's act is now: times count from here."""
        self.act_at, self._act_wall = time.monotonic(), time.time()
        self.record.mark(0.0, text)

    def since(self, moment: float | None = None) -> float:
        """Seconds from the act to a moment of time.monotonic(), or to now."""
        return (time.monotonic() if moment is None else moment) - self.act_at

    def since_wall(self, event: dict[str, Any]) -> float:
        """Seconds from the act to an event of the daemon."""
        return float(event["time"]) - self._act_wall

    def mark(self, text: str, at_s: float | None = None) -> None:
        """A line of the timeline, at `at_s` or now."""
        self.record.mark(self.since() if at_s is None else at_s, text)

    async def streams(self, count: int, tokens: int = ENDLESS) -> list[Seen]:
        """Start streams; those whose first token has come. The others are hung up.

        How long the first of them may take follows from the model's load, how long the others and
        answers after the act may, from the first of them.

        Raises:
            Broken: not one begins.
        """
        load_s = (await self.model()).load_s or 0.0
        asked_at = time.monotonic()
        begun = [self.client.begin(self.model_id, tokens) for _ in range(count)]
        first = [asyncio.create_task(seen.begun.wait()) for seen, _ in begun]
        one = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(first, timeout=patience_s(load_s), return_when=one)
        if done:
            took_s = time.monotonic() - asked_at
            self.answer_s = patience_s(took_s)
            await asyncio.wait(first, timeout=max(0.0, self.answer_s - took_s))
        for waiting in first:
            waiting.cancel()
        late = [task for seen, task in begun if not seen.begun.is_set()]
        await self.client.leave(*late)
        found = [seen for seen, _ in begun if seen.begun.is_set()]
        if not found:
            raise Broken("served", f"no stream begins: {[seen for seen, _ in begun]}")
        return found

    async def answer(self, what: str) -> Seen:
        """Ask for a few tokens of the model under drill and wait for all of them.

        Raises:
            Broken: the deadline passed.
        """
        asked = self.client.answer(self.model_id)
        return await self.wait("served", what, asked, LOAD_DEADLINE_S)

    async def ended(
        self, promise: str, seen: list[Seen], deadline_s: float = LOAD_DEADLINE_S
    ) -> float:
        """Wait until all of them have their outcome; when the last had it, since the act."""
        ended = poll(lambda: all(one.ended_at is not None for one in seen))
        await self.wait(promise, "every client has its outcome", ended, deadline_s)
        return max(self.since(one.ended_at) for one in seen)

    # Judging

    def judge_complete(self, promise: str, *seen: Seen) -> None:
        """Whether every one of these answers came to its proper end."""
        wrong = [repr(one) for one in seen if not one.is_complete]
        self.record.that(promise, not wrong, "; ".join(wrong[:SHOWN_MAX]))

    def judge_replaced(self, before: ModelStatus, after: ModelStatus) -> None:
        """Whether another process took over."""
        self.record.that("pid_changed", after.pid not in (None, before.pid), f"{after.pid}")

    def judge_same(self, before: ModelStatus, after: ModelStatus) -> None:
        """Whether the engine went on in its own process."""
        self.record.that("same_engine", after.pid == before.pid, f"{before.pid}, {after.pid}")


def _named(status: Status, name: str) -> ModelStatus:
    model = status.model(name)
    if model is None:
        raise Broken("served", f"the daemon has no model {name!r}")
    return model


def _message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str((error or {}).get("message") or answer)
