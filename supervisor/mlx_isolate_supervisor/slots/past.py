"""What became of one model's engines, and what follows for the next: failure, respawn, next try.

Remembers how they ended and asks `restart` what that means; when the next one is started is the
machine's business. Written by messages of its slot only.
"""

from collections import Counter

from mlx_isolate_shared import wire
from mlx_isolate_shared.config import EXIT_CANNOT_WORK
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.model_files import Fingerprint, model_fingerprint
from mlx_isolate_supervisor.slots import causes
from mlx_isolate_supervisor.slots.lifecycle import Event
from mlx_isolate_supervisor.slots.restart import Ending, RestartBudget, after_completion, judge
from mlx_isolate_supervisor.slots.slot_context import SlotContext
from mlx_isolate_supervisor.telemetry.status import Failure, LastExit

# Files of a model that cannot work are looked at no more often than this, however many ask.
FILES_LOOK_S = 0.2

# After more deaths in a row than this a model's engines are spawned afresh: a crash loop must not
# eat the spare that another model may need.
STANDBY_STREAK_MAX = 1

# Pause before a model whose engine was lost to a fault of our own is tried again; doubles.
PAUSE_S = 1.0


class Past:
    """The past of one model.

    Attributes:
        last_exit: the record of the last end.
        restarts: respawns after an end that nobody asked for, by cause.
        failure: why the model is FAILED, without the time of the next try; None where it is not.
        try_delay_s: how long after the last end the next try comes.
    """

    def __init__(self, context: SlotContext) -> None:
        self._settings = context.settings.restart
        self._now = context.clock.monotonic
        self._jitter = context.jitter
        self.last_exit: LastExit | None = None
        self.restarts: Counter[str] = Counter()
        self.failure: Failure | None = None
        self.try_delay_s = 0.0
        self._budget = RestartBudget()
        self._respawn_cause: str | None = None
        # Engines lost to faults of our own code since the last completion.
        self._lost_to_faults = 0
        self._files: Fingerprint = ()
        self._files_looked_at = 0.0

    @property
    def is_final(self) -> bool:
        """Whether the model has failed and is not to be tried again."""
        return self.failure is not None and self.failure.cause == "cannot_work"

    @property
    def is_end_planned(self) -> bool:
        """Whether the last engine that ended had been told to."""
        return self.last_exit is not None and self.last_exit.cause == "planned"

    @property
    def deserves_standby(self) -> bool:
        """Not in a crash loop, nor after exit 78: it would only use them up."""
        could_work = self.last_exit is None or self.last_exit.code != EXIT_CANNOT_WORK
        return could_work and self._budget.streak <= STANDBY_STREAK_MAX

    def judge(self, ending: Ending, exit: LastExit, reported: wire.Failed | None) -> Event:
        """An engine has ended: what that is to the lifecycle.

        Args:
            exit: the record of that end.
            reported: the engine's own last word, if it had one.
        """
        judgement = judge(
            ending,
            self._budget,
            now=self._now(),
            jitter=self._jitter(),
            settings=self._settings,
        )
        self._budget = judgement.budget
        self.try_delay_s = judgement.delay_s or 0.0
        self._respawn_cause = None if ending.planned else exit.cause
        self.failure = causes.failure_of(judgement, exit, reported)
        return judgement.event

    def note_spawn(self, spec: ModelSpec) -> None:
        """An engine of `spec` is about to be started, where there is none."""
        if self._respawn_cause is not None:
            self.restarts[self._respawn_cause] += 1
            self._respawn_cause = None
        self.failure = None
        self.note_files(spec)

    def note_files(self, spec: ModelSpec) -> None:
        """The model's files as they are now are those that an engine loads."""
        self._files = model_fingerprint(spec)

    def note_completion(self) -> None:
        """An engine completed a completion."""
        self._lost_to_faults = 0
        self._budget = after_completion(self._budget)

    def note_own_fault(self) -> None:
        """An engine was lost to a fault of our own code: the next try comes soon, then later."""
        self.try_delay_s = min(
            PAUSE_S * 2.0 ** min(self._lost_to_faults, 32), self._settings.half_open_max_s
        )
        self._lost_to_faults += 1
        self.failure = causes.own_fault()

    def forget_crashes(self) -> None:
        """Empty the restart budget."""
        self._budget = RestartBudget()

    def forget_cause(self) -> None:
        """The next start is no respawn."""
        self._respawn_cause = None

    def has_other_files(self, spec: ModelSpec) -> bool:
        """Whether the model's files have changed since the last start; looked at now and then."""
        now = self._now()
        if now - self._files_looked_at < FILES_LOOK_S:
            return False
        self._files_looked_at = now
        files = model_fingerprint(spec)
        return bool(files) and files != self._files
