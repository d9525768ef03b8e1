"""Spare engine processes: started ahead, their imports done, waiting for a model to take them.

Makes, replaces and ends them; which model each gets ready for is decided in `standby_plan`. They
are made while nothing loads, so that they never compete with a load. Lives on the event loop.
"""

import asyncio
import logging
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from mlx_isolate_shared import wire
from mlx_isolate_shared.footprint import MemoryKind
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines import memory
from mlx_isolate_supervisor.engines.child import EngineName, Exit, environment_of
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.process import EngineProcess, ProcessListener
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from mlx_isolate_supervisor.engines.standby_plan import (
    Demand,
    Spare,
    assign,
    choose,
    choose_targets,
)
from mlx_isolate_supervisor.slots.restart import Ending, RestartBudget, after_completion, judge
from mlx_isolate_supervisor.slots.slot_settings import RestartSettings
from mlx_isolate_supervisor.telemetry.logs import log_event
from mlx_isolate_supervisor.telemetry.status import StandbyStatus

# What a spare is called before a model takes it.
STANDBY_ID = "standby"
# Without a number given, one spare is kept where at least this much memory is free.
FREE_BYTES_MIN = 8_000_000_000
# How often it is looked whether the spares still suit the models.
TEND_INTERVAL_S = 10.0
# A spare that has not prepared within this time hangs; it is ended, which counts as a death.
PREPARE_LIMIT_S = 120.0
# What a spare is expected to hold, for the memory budget.
SPARE_BYTES = 300_000_000
# Lines of a spare's output that are kept; all of them are in the log.
OUTPUT_LINES_MAX = 100


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What the spares go by.

    Attributes:
        demands: the models that are to be up, in configured order.
        is_loading: whether some engine loads just now.
        has_room: whether the memory budget of all models allows another spare.
        on_gone: called when a spare has ended, since a model may wait for its memory.
        available_bytes: memory that is free for another process; None if unknown.
        jitter: a random number in -1..1 for the delay after a death.
    """

    demands: Callable[[], Sequence[Demand]]
    is_loading: Callable[[], bool]
    has_room: Callable[[], bool] = lambda: True
    on_gone: Callable[[], object] = lambda: None
    available_bytes: Callable[[], int | None] = memory.available_bytes
    jitter: Callable[[], float] = lambda: random.uniform(-1.0, 1.0)


class _Member:
    """One spare with its process."""

    def __init__(self, process: EngineProcess, plan: Spare) -> None:
        self.process = process
        self.plan = plan
        self.made_at = plan.told_at
        self.since = time.time()
        self.memory: tuple[int, MemoryKind] | None = None
        self.measured_at = float("-inf")
        self.is_dismissed = False

    def measure(self, now: float) -> None:
        """Look how large it is; the kernel walks all its pages for that."""
        self.memory = memory.footprint(self.process.pid) or self.memory
        self.measured_at = now

    def status(self) -> StandbyStatus:
        return StandbyStatus(
            pid=self.process.pid,
            is_prepared=self.plan.is_prepared,
            model=self.plan.spec.id if self.plan.spec is not None else None,
            memory_bytes=self.memory[0] if self.memory else None,
            memory_kind=self.memory[1] if self.memory else None,
            since=self.since,
        )


class Standbys:
    """The spare engines of one supervisor. Call `start` on the event loop; `stop` ends them.

    Args:
        restart: limits of replacing spares that die.
        count: how many to keep; None = one where FREE_BYTES_MIN are free.
    """

    def __init__(
        self,
        command: EngineCommand,
        restart: RestartSettings,
        run_directory: RunDirectory,
        surroundings: Surroundings,
        count: int | None,
    ) -> None:
        self._command = command
        self._restart = restart
        self._run_directory = run_directory
        self._surroundings = surroundings
        self._count = count
        self._members: list[_Member] = []
        self._made = 0
        self._budget = RestartBudget()
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = False
        self._is_due = False

    def start(self) -> None:
        """Begin to make spares, as soon as nothing loads."""
        if self._count != 0:
            self._is_running = True
            self.note_change()

    async def stop(self) -> None:
        """End all of them; they have nothing to lose."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
        members = tuple(self._members)
        for member in members:
            self._dismiss(member)
        await asyncio.gather(*(member.process.wait_exit() for member in members))

    @property
    def held_bytes(self) -> int:
        """What all of them hold, as far as they have been measured."""
        return sum(member.memory[0] for member in self._members if member.memory is not None)

    def shed(self) -> None:
        """End all of them: a model needs the memory."""
        for member in tuple(self._members):
            if not member.is_dismissed:
                self._log("standby.shed", member)
                self._dismiss(member)

    def note_change(self) -> None:
        """Something about the models has changed: look soon whether the spares still suit."""
        if self._is_running and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tend)

    def status(self) -> tuple[StandbyStatus, ...]:
        """A snapshot from memory, oldest first."""
        return tuple(member.status() for member in self._members)

    def take(
        self,
        spec: ModelSpec,
        incarnation: int,
        *,
        listener: ProcessListener,
        output: deque[str],
    ) -> EngineProcess | None:
        """Make the best fitting spare an engine of `spec`; None where there is none."""
        environment = environment_of(self._command, spec)
        while self._is_running:
            # While spares die of their preparation, one that still prepares is no gain.
            members = [
                member
                for member in self._members
                if not member.is_dismissed and (member.plan.is_prepared or not self._budget.streak)
            ]
            plans = [member.plan for member in members]
            index = choose(plans, spec, environment, time.monotonic())
            if index is None:
                return None
            member = members[index]
            if member.process.is_alive():
                self._members.remove(member)
                member.process.begin(
                    self._command, spec, incarnation, listener=listener, output=output
                )
                self._budget = after_completion(self._budget)
                self._log("standby.taken", member, model=spec.id, incarnation=incarnation)
                return member.process
            # `on_exit` has taken the dead one off the list.
            assert member not in self._members
        return None

    # -- What the spares do (process.ProcessListener) ---------------------------------------------

    def on_report(self, process: EngineProcess, message: wire.Report) -> None:
        """A report line came."""
        member = self._find(process)
        if member is None or member.is_dismissed:
            return
        if isinstance(message, wire.Loading) and message.stage == "prepared":
            member.plan = msgspec.structs.replace(member.plan, is_prepared=True)
            member.measure(time.monotonic())
            self._log("standby.prepared", member, prepared=member.status().model)
            self.note_change()

    def on_report_end(self, process: EngineProcess) -> None:
        """The report pipe ended: it is of no use any more, dead or not."""
        process.send_signal(signal.SIGKILL)

    def on_dying(self, process: EngineProcess) -> None:
        """It ends; what follows from that waits for its exit."""

    def on_exit(self, process: EngineProcess, exit: Exit) -> None:
        """A spare is gone; another is due after the restart policy's delay."""
        member = self._find(process)
        assert member is not None, process.pid
        self._members.remove(member)
        self._surroundings.on_gone()
        if not member.is_dismissed:
            self._note_death(lived_s=time.monotonic() - member.made_at)
            how = exit.signal or f"exit {exit.code}"
            wait_s = max(0.0, self._next_at - time.monotonic())
            self._log("standby.lost", member, level=logging.WARNING, how=how, next_in_s=wait_s)
        self.note_change()

    def _find(self, process: EngineProcess) -> _Member | None:
        return next((member for member in self._members if member.process is process), None)

    def _note_death(self, lived_s: float) -> None:
        now = time.monotonic()
        judgement = judge(
            # Exit 78 is about a model, and a spare has none: it counts as any death.
            Ending(
                wanted=True, planned=False, code=None, completed=lived_s >= self._restart.window_s
            ),
            self._budget,
            now=now,
            jitter=self._surroundings.jitter(),
            settings=self._restart,
        )
        self._budget = judgement.budget
        self._next_at = now + (judgement.delay_s or 0.0)

    # -- Tending ----------------------------------------------------------------------------------

    def _tend(self) -> None:
        self._is_due = False
        if not self._is_running:
            return
        now = time.monotonic()
        for member in self._members:
            self._look_at(member, now)
        wait_s = TEND_INTERVAL_S
        if not self._surroundings.is_loading():
            if self._lacks_one():
                if now >= self._next_at:
                    self._make()
                wait_s = min(wait_s, max(0.0, self._next_at - now))
            else:
                self._rebind(now)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(wait_s, 0.01), self._tend)

    def _look_at(self, member: _Member, now: float) -> None:
        if now - member.measured_at >= TEND_INTERVAL_S / 2:
            member.measure(now)
        if not member.plan.is_prepared:
            if now - member.plan.told_at > PREPARE_LIMIT_S:
                member.process.send_signal(signal.SIGKILL)
        elif now - member.made_at >= self._restart.window_s:
            self._budget = after_completion(self._budget)

    def _lacks_one(self) -> bool:
        """Whether another is to be made now: one after the other, and only with memory for it."""
        if any(not member.plan.is_prepared for member in self._members):
            return False
        if not self._surroundings.has_room():
            return False
        if self._count is not None:
            return len(self._members) < self._count
        if self._members:
            return False
        available = self._surroundings.available_bytes()
        return available is not None and available >= FREE_BYTES_MIN

    def _targets(self) -> list[ModelSpec]:
        if self._budget.streak:
            # What a model brings along may have killed the last one.
            return []
        bound = [member.plan.spec for member in self._members]
        demands = self._surroundings.demands()
        return choose_targets(demands, bound, 1 if self._count is None else self._count)

    def _make(self) -> None:
        bound = [member.plan.spec for member in self._members]
        spec = assign([*bound, None], self._targets())[-1]
        environment = environment_of(self._command, spec)
        self._made += 1
        try:
            process = EngineProcess.launch(
                self._command,
                environment,
                EngineName(STANDBY_ID, self._made),
                run_directory=self._run_directory,
                listener=self,
                output=deque(maxlen=OUTPUT_LINES_MAX),
            )
        except OSError as error:
            self._note_death(lived_s=0.0)
            log_event("standby.not_started", logging.WARNING, reason=error.strerror)
            return
        plan = Spare(
            spec=None, environment=environment, is_prepared=False, told_at=time.monotonic()
        )
        member = _Member(process, plan)
        self._members.append(member)
        self._prepare(member, spec)
        self._log("standby.started", member, prepares=member.status().model)

    def _prepare(self, member: _Member, spec: ModelSpec | None) -> None:
        member.plan = msgspec.structs.replace(
            member.plan, spec=spec, is_prepared=False, told_at=time.monotonic()
        )
        if spec is None:
            message = wire.Prepare(cache_home=self._command.cache_home)
        else:
            message = wire.Prepare(
                model=spec.model, cache_home=self._command.cache_home, settings=spec.engine
            )
        member.process.prepare(message)

    def _rebind(self, now: float) -> None:
        members = [member for member in self._members if not member.is_dismissed]
        wishes = assign([member.plan.spec for member in members], self._targets())
        for member, spec in zip(members, wishes, strict=True):
            if spec is None or spec == member.plan.spec or not member.plan.may_change_over(now):
                continue
            environment = environment_of(self._command, spec)
            if member.plan.fits(spec, environment, now):
                self._prepare(member, spec)
            else:
                # The next one will fit; it is made once this one is gone.
                self._dismiss(member)

    def _dismiss(self, member: _Member) -> None:
        member.is_dismissed = True
        member.process.send_signal(signal.SIGKILL)

    def _log(
        self, event: str, member: _Member, *, level: int = logging.INFO, **facts: object
    ) -> None:
        log_event(event, level, pid=member.process.pid, **facts)
