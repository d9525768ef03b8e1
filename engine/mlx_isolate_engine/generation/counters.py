"""Running totals of the generation thread, read without locks by whoever reports them."""

from mlx_isolate_engine.generation.plan import EndKind


class Counters:
    """Plain integers with one writer each, so that a reader needs no lock.

    `submitted` and `coming` (completions that are being prepared and not yet submitted) are written
    by the event loop, everything else by the generation thread.
    """

    def __init__(self) -> None:
        self.submitted = 0
        self.coming = 0
        self.ended = 0
        self.active = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.completed = 0
        self.cancelled = 0
        self.failed = 0
        self.stalled = 0

    @property
    def queued(self) -> int:
        """Submitted, not ended and not yet running."""
        return max(0, self.submitted - self.ended - self.active)

    def count_end(self, kind: EndKind) -> None:
        """Count one completion that ended."""
        self.ended += 1
        match kind:
            case "completed":
                self.completed += 1
            case "cancelled":
                self.cancelled += 1
            case "stalled":
                self.stalled += 1
            case "failed":
                self.failed += 1
