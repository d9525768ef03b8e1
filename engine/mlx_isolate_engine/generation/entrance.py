"""The way into the batch: rows that wait, and rows whose cached prefix is being looked for.

Owns them until they are handed over with what they begin with. In which order they come is decided
by `admission`; knows nothing of the generator.
"""

from collections.abc import Collection, Generator, Iterator

from mlx_isolate_engine.generation import admission
from mlx_isolate_engine.generation.lane import LaneParts
from mlx_isolate_engine.generation.layerwise import LayerwiseGenerator
from mlx_isolate_engine.generation.pacing import PrefillPace
from mlx_isolate_engine.generation.reuse import Found
from mlx_isolate_engine.generation.row import Row
from mlx_isolate_engine.generation.sharing import SharedPrefills
from mlx_isolate_engine.generation.ticket import Ticket

# Share of max_step_s that a step may spend on reading cached prefixes from disk.
RESTORE_SHARE = 0.3
# Who has come waits so long for those who are being prepared, to join with them: joining one by one
# costs everybody some passes of the model each time.
COALESCE_S = 0.025


class Entrance:
    """Rows that are to join the batch.

    Args:
        parts: what its lane works with.
        pace: how long prefill takes.
        shared: prompts of several choices.
        room: memory for rows; None = not limited.

    Attributes:
        waiting: in order of arrival.
        restoring: counted as active, each with the search for its prefix; the first is being read.
    """

    def __init__(
        self,
        parts: LaneParts,
        pace: PrefillPace,
        shared: SharedPrefills,
        room: admission.Room | None,
    ) -> None:
        settings = parts.settings
        self._settings = settings
        self._reuse = parts.reuse
        self._counters = parts.counters
        self._clock = parts.clock
        self._pace = pace
        self._shared = shared
        self._room = room
        self._rows_max = max(1, settings.decode_concurrency)
        self._prompts_max = max(1, min(settings.prompt_concurrency, self._rows_max))
        self._is_shut = False
        self.waiting: list[Row] = []
        self.restoring: list[tuple[Row, Generator[None, None, Found]]] = []

    @property
    def rows(self) -> list[Row]:
        """All of them."""
        return [*self.waiting, *(row for row, _ in self.restoring)]

    def company_due_s(self) -> float:
        """How long those who wait should go on waiting for those who are being prepared."""
        if not self._counters.coming or len(self.waiting) >= self._prompts_max:
            return 0.0
        first = min((row.submitted_at for row in self.waiting), default=0.0)
        return max(0.0, first + COALESCE_S - self._clock.monotonic())

    def shuts(self, prefilling: Collection[Row], generator: LayerwiseGenerator) -> bool:
        """Whether nobody joins in this step, since large rows leave those whose prompts run.

        mlx-lm joins first and divides then, and would copy every one of them twice more. For one
        step at most: others may be leaving in the next one.
        """
        is_leaving = any(row.prompt_left <= 1 for row in prefilling)
        self._is_shut = is_leaving and not self._is_shut and generator.has_large_prompts
        return self._is_shut

    def drop(self, ticket: Ticket) -> bool:
        """Forget the row of `ticket`; whether it was here."""
        for position, waiting in enumerate(self.waiting):
            if waiting.ticket is ticket:
                del self.waiting[position]
                return True
        for position, (restoring, steps) in enumerate(self.restoring):
            if restoring.ticket is ticket:
                del self.restoring[position]
                self._counters.active -= 1
                steps.close()
                return True
        return False

    def close(self) -> None:
        """Give back what reads from disk."""
        for _, steps in self.restoring:
            steps.close()

    def let_in(
        self, prefilling: Collection[Row], decoding: Collection[Row], adapter: str | None
    ) -> None:
        """Begin to look for the prefixes of those who join now.

        Args:
            prefilling, decoding: rows in the batch.
            adapter: the one that is mounted; who needs another goes on waiting.
        """
        for row in self._choose(prefilling, decoding, adapter):
            self._counters.active += 1
            self.restoring.append((row, self._find(row)))

    def takes_back(self, row: Row, prefilling: Collection[Row], decoding: Collection[Row]) -> bool:
        """Whether a row that was taken out of the batch may join it again now."""
        running = [*prefilling, *decoding, *(row for row, _ in self.restoring)]
        longest = max((each.length for each in running), default=0)
        return not running or (
            len(running) < self._rows_max
            and admission.fits(len(running) + 1, max(longest, row.length), self._room)
        )

    def _choose(
        self, prefilling: Collection[Row], decoding: Collection[Row], adapter: str | None
    ) -> list[Row]:
        """Take the rows that join now from those that wait."""
        running = [*prefilling, *(row for row, _ in self.restoring)]
        there = [*running, *decoding]
        lefts = [row.prompt_left for row in running if row.prompt_left > 1]
        batch = admission.Batch(
            prefilling=lefts,
            decoding=len(decoding) + len(running) - len(lefts),
            tokens_left=max((row.plan.max_tokens - row.generated for row in there), default=0),
            longest=max((row.length for row in there), default=0),
            rows_max=self._rows_max,
            prompts_max=self._prompts_max,
            allowance=self._pace.allowance(is_quiet=not decoding),
            step_size=self._settings.prefill_step_size,
            room=self._room,
        )
        mounted = [row for row in self.waiting if row.plan.adapter == adapter]
        candidates = self._shared.candidates(mounted, [r for r in running if r.prompt_left > 1])
        waiters = [
            admission.Waiter(
                tokens=1 if self._shared.has(row) else row.prompt_left - self._reuse.expect(row),
                length=row.length,
                since=row.submitted_at,
                max_tokens=row.plan.max_tokens,
            )
            for row in candidates
        ]
        chosen = admission.choose(waiters, batch, self._clock.monotonic())
        rows = [candidates[position] for position in chosen]
        self.waiting = [row for row in self.waiting if row not in rows]
        return rows

    def _find(self, row: Row) -> Generator[None, None, Found]:
        """What the row begins with: its sibling's prompt, or what the prompt cache has."""
        found = self._shared.take(row)
        if found is not None:
            return found
        return (yield from self._reuse.find(row))

    def restored(self) -> Iterator[tuple[Row, Found]]:
        """Look for prefixes, and hand over each row whose own is found, to be taken at once.

        A long read from disk goes on when this is called again.
        """
        deadline = self._clock.monotonic() + self._settings.max_step_s * RESTORE_SHARE
        while self.restoring:
            row, steps = self.restoring[0]
            try:
                next(steps)
            except StopIteration as end:
                del self.restoring[0]
                yield row, end.value
                continue
            if self._clock.monotonic() >= deadline:
                return
