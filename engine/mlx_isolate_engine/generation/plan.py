"""Everything about one completion that is settled before it runs; plain data, no mlx."""

from typing import Any, Literal

import msgspec

from mlx_isolate_engine.completion.events import Placement
from mlx_isolate_engine.generation.ports import EntryKind


class SamplingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved sampler and logits-processor settings; every value has been checked.

    Attributes:
        temperature: 0 = greedy.
        top_k: 0 = off, else below the vocabulary's size.
        seed: unsigned 64 bit, None = really random.
        *_context_size: how many of the last tokens a penalty looks at, prompt included.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the prompt, as a count of tokens from its start, worth a cache entry."""

    end: int
    kind: EntryKind


class PromptPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in tokens, with its checkpoints in rising order, each below len(tokens)."""

    tokens: list[int]
    checkpoints: tuple[Checkpoint, ...] = ()


class TextPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become events.

    Attributes:
        stop: stop strings, none of them empty.
        initial_state: `normal`, or `reasoning` if the prompt ends inside a think block.
        split_reasoning: think blocks become reasoning deltas (chat only).
        tools: the request's tools, for the tool parser; None = tool calls stay text.
        one_call: the answer ends with its first call.
        stream_calls: give arguments of tool calls out piece by piece where the family allows it.
        trim_space: drop one leading space, where the tokenizer marks the start of text with one.
        top_logprobs: None = no logprobs, else so many alternatives per token.
    """

    stop: tuple[str, ...] = ()
    initial_state: str = "normal"
    split_reasoning: bool = False
    tools: tuple[dict[str, Any], ...] | None = None
    one_call: bool = False
    stream_calls: bool = False
    trim_space: bool = False
    top_logprobs: int | None = None


class AwaitedMarker(msgspec.Struct, frozen=True, kw_only=True):
    """A text behind which a grammar begins, wherever the model writes it.

    Attributes:
        text: in bytes, at least one.
        overruns: at place n the tokens that, once n bytes of the text are there, would complete it
            and go on behind it, where nobody could tell what may follow.
    """

    text: bytes
    overruns: tuple[tuple[int, ...], ...]


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that an answer must follow.

    Attributes:
        matcher: llguidance's LLMatcher at its start; every row takes a copy.
        after: the answer begins behind this marker (the end of a think block); None = at once.
    """

    matcher: Any
    after: AwaitedMarker | None = None


class CallConstraint(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that every tool call must follow, from where the model begins one by itself.

    Attributes:
        matcher: llguidance's LLMatcher right behind the opening marker; every call takes a copy.
        opening: the marker.
    """

    matcher: Any
    opening: AwaitedMarker


class CompletionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, ready to run.

    Attributes:
        group: the same for completions that have this prompt and share its prefill; None = alone.
        choices: how many of them there are.
        adapter: which one it runs with, None = the model as it was loaded.
        draft_tokens: tokens that the draft model proposes at a time; 0 = it runs without.
    """

    request_id: str
    prompt: PromptPlan
    max_tokens: int
    sampling: SamplingPlan
    text: TextPlan
    constraint: Constraint | CallConstraint | None = None
    group: str | None = None
    choices: int = 1
    adapter: str | None = None
    draft_tokens: int = 0
    namespace: str = "default"
    placement: Placement = "continuous"


EndKind = Literal["completed", "cancelled", "stalled", "failed"]
