"""What the generation thread needs from its neighbours: a loaded model and a prompt cache."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, Protocol

from mlx_isolate_shared.wire import CacheFigures, ModelFacts

# What a cache entry ends at: the system prompt, the turns before the last message, the whole
# prompt without its last token, a completion, or a prefill that was cut off.
EntryKind = Literal["system", "history", "prompt", "assistant", "partial"]


class LoadedModel(Protocol):
    """A model and its tokenizer; mlx_lm's untyped objects, used on the generation thread only.

    The tokenizer may be used by any thread for encoding, decoding and templates.
    """

    @property
    def model(self) -> Any:
        """mlx_lm's nn.Module."""
        ...

    @property
    def tokenizer(self) -> Any:
        """mlx_lm's TokenizerWrapper."""
        ...

    @property
    def facts(self) -> ModelFacts:
        """What it is."""
        ...


class Adapters(Protocol):
    """Adapters that completions choose by name; every call happens on the generation thread."""

    @property
    def digests(self) -> Mapping[str, str]:
        """What each one's KV state depends on, by name; may be read from any thread."""
        ...

    def mount(self, name: str | None) -> None:
        """Put these layers in; harmless if they are in."""
        ...


class Taken(Protocol):
    """Where the prefix of a prompt came from, and why."""

    @property
    def tier(self) -> Literal["ram", "ssd", "none"]:
        """Which tier had it."""
        ...

    @property
    def reason(self) -> str:
        """Of the choice between restoring and running, or of the miss."""
        ...


class PromptCache(Protocol):
    """Prefixes of prompts with their KV state; every call happens on the generation thread."""

    def take_stepwise(
        self,
        tokens: Sequence[int],
        namespace: str,
        *,
        length_min: int = 0,
        length_max: int | None = None,
        is_last_try: bool = True,
    ) -> Generator[None, None, tuple[list[Any] | None, int]]:
        """The longest usable prefix of `tokens` as a cache of the caller's own, and its length.

        Yields while it reads from disk, for others to go on. At least one token is always left to
        run, so the length is below len(tokens). A prefix shorter than length_min is of no use.
        Where it is not the last try, nothing found is no miss yet.
        """
        ...

    def expect(self, tokens: Sequence[int], namespace: str) -> Callable[[], int]:
        """Tells at each call how long a prefix take_stepwise would find in memory just now."""
        ...

    @property
    def last_take(self) -> Taken:
        """About the take that ended last."""
        ...

    def put(
        self, tokens: Sequence[int], cache: Sequence[Any], namespace: str, kind: EntryKind
    ) -> None:
        """Keep a cache that holds `tokens`."""
        ...

    def wants_checkpoint(self, cache: Sequence[Any]) -> bool:
        """Whether entries in the middle of a completion are of use for this kind of cache."""
        ...

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """How fast prompts run through the model."""
        ...

    def set_idle(self, idle: bool) -> None:
        """Whether the generation thread has nothing to do."""
        ...

    def figures(self) -> CacheFigures:
        """Counters; may be read from any thread."""
        ...


LoadModel = Callable[[], LoadedModel]
LoadAdapters = Callable[[LoadedModel], Adapters]
MakePromptCache = Callable[[LoadedModel], PromptCache | None]
