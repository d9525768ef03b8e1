"""One completion on the generation thread: its text, its figures and how it ends."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    Event,
    FinishReason,
    Placement,
    PrefillProgress,
    Timings,
)
from mlx_isolate_engine.generation.assembly import TextAssembly
from mlx_isolate_engine.generation.constrained import CallProcessor, ConstraintProcessor
from mlx_isolate_engine.generation.logprobs import LogprobSampler
from mlx_isolate_engine.generation.plan import CallConstraint, Checkpoint, Constraint
from mlx_isolate_engine.generation.ports import Taken
from mlx_isolate_engine.generation.sampling import (
    GuardedProcessor,
    GuardedSampler,
    SamplerMaker,
    make_processors,
)
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_engine.generation.vocabulary import Vocabulary
from mlx_isolate_shared.clock import Clock


class ModelFamily:
    """What all rows of one loaded model share.

    Args:
        tokenizer: mlx_lm's TokenizerWrapper.
        vocabulary_size: width of the model's output.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self.vocabulary_size = vocabulary_size
        self.end_tokens: frozenset[int] = frozenset(tokenizer.eos_token_ids)
        newline = tokenizer.encode("\n", add_special_tokens=False)
        self.samplers = SamplerMaker(vocabulary_size, [*newline, *self.end_tokens])


def _held_to(constraint: Constraint | CallConstraint, family: ModelFamily) -> Any:
    if isinstance(constraint, CallConstraint):
        return CallProcessor(constraint, family.vocabulary_size, family.vocabulary.raw)
    return ConstraintProcessor(constraint, family.vocabulary_size, family.vocabulary.raw)


class Advance(NamedTuple):
    """What a row made of a token: events, why it ends with it (if it does), or what failed."""

    events: list[Event]
    reason: FinishReason | None
    error: Exception | None = None


class Row:
    """One completion from the moment it is submitted to its end.

    Args:
        ticket: what was submitted.
        family: the model's shared parts.
        clock: for the timings.
    """

    def __init__(self, ticket: Ticket, family: ModelFamily, clock: Clock) -> None:
        self.ticket = ticket
        self.plan = ticket.plan
        self._family = family
        self._clock = clock
        self.submitted_at = clock.monotonic()
        self.uid = -1
        self.reused = 0
        self.taken: Taken | None = None
        # Tells how much of the prompt the cache would save; set when it is first asked.
        self.expectation: Callable[[], int] | None = None
        self.prefilled = 0
        self.generated = 0
        self.drafted = 0
        self.accepted = 0
        self.checkpoints: deque[Checkpoint] = deque()
        self.assembly = TextAssembly(self.plan.text, family.vocabulary.decoder(), family.tokenizer)
        self._processors = make_processors(self.plan.sampling)
        if self.plan.constraint is not None:  # last: what it forbids, nothing may allow again
            self._processors.append(GuardedProcessor(_held_to(self.plan.constraint, family)))
        self._sampler = family.samplers.make(self.plan.sampling)
        self._noted: LogprobSampler | None = None
        if self.plan.text.top_logprobs is not None:
            self._noted = LogprobSampler(self._sampler, self.plan.text.top_logprobs)
            self._sampler = GuardedSampler(self._noted)
        self._started_at = self._first_token_at = self.submitted_at

    @property
    def prompt_left(self) -> int:
        """Prompt tokens still to run."""
        return len(self.plan.prompt.tokens) - self.reused - self.prefilled

    @property
    def has_run(self) -> bool:
        """Whether its cache holds anything; of one that does not, mlx-lm hands out nothing."""
        return self.reused + self.prefilled + self.generated > 0

    @property
    def length(self) -> int:
        """Tokens in its cache when all that is known so far has run."""
        return len(self.plan.prompt.tokens) + self.generated

    @property
    def sampler(self) -> GuardedSampler:
        """The row's sampler; one and the same object for rows that may share it."""
        return self._sampler

    @property
    def processors(self) -> list[GuardedProcessor]:
        """The row's logits processors; they see prompt and generated tokens."""
        return self._processors

    def start(self, reused: int) -> None:
        """The row joins a lane with `reused` tokens from the prompt cache."""
        self.reused = reused
        self._started_at = self._first_token_at = self._clock.monotonic()

    def note_prefill(self, done: int) -> tuple[int, PrefillProgress]:
        """`done` of the uncached prompt tokens have run: how many are new, and the event."""
        new, self.prefilled = done - self.prefilled, done
        total = len(self.plan.prompt.tokens)
        return new, PrefillProgress(done=self.reused + done, total=total)

    def take_token(self, token: int) -> Advance:
        """One more token was generated. What the row's own parts raise ends this row alone."""
        failure = self._sampler.error
        for processor in self._processors:
            failure = failure or processor.error
        if failure is not None:
            return Advance([], None, failure)
        try:
            return self._take_token(token)
        except Exception as error:  # noqa: BLE001 - the top frame of this row
            return Advance([], None, error)

    def _take_token(self, token: int) -> Advance:
        if self.generated == 0:
            self._first_token_at = self._clock.monotonic()
        self.generated += 1
        logprob = self._noted.pop(token, self._family.vocabulary) if self._noted else None
        if token in self._family.end_tokens:
            return Advance(self.assembly.finish(), "stop")
        events = self.assembly.feed(token, logprob)
        if self.assembly.is_whole:
            return Advance(events + self.assembly.finish(), "stop")
        if self.generated >= self.plan.max_tokens:
            return Advance(events + self.assembly.finish(is_cut=True), "length")
        return Advance(events, None)

    def summary(self, reason: FinishReason, placement: Placement) -> CompletionSummary:
        """How it ended."""
        if reason == "stop" and self.assembly.has_tool_calls:
            reason = "tool_calls"
        now = self._clock.monotonic()
        prompt_tokens = len(self.plan.prompt.tokens)
        prompt_s = max(self._first_token_at - self._started_at, 1e-9)
        # The first token belongs to the prompt's time: so many more were made after it.
        predicted_s = max(now - self._first_token_at, 1e-9)
        return CompletionSummary(
            finish_reason=reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=self.generated,
            cached_tokens=self.reused,
            reasoning_tokens=self.assembly.reasoning_tokens,
            stop_string=self.assembly.stop_string,
            timings=Timings(
                cache_n=self.reused,
                prompt_n=prompt_tokens - self.reused,
                prompt_ms=prompt_s * 1e3,
                prompt_per_second=(prompt_tokens - self.reused) / prompt_s,
                predicted_n=self.generated,
                predicted_ms=predicted_s * 1e3,
                predicted_per_second=max(0, self.generated - 1) / predicted_s,
                placement=placement,
                draft_n=self.drafted,
                draft_n_accepted=self.accepted,
                cache_tier=self.taken.tier if self.taken else "none",
                cache_reason=self.taken.reason if self.taken else "off",
            ),
        )


def row_of(rows: Iterable[Row], ticket: Ticket) -> Row | None:
    """The row of a completion among these, if it is there."""
    return next((row for row in rows if row.ticket is ticket), None)
