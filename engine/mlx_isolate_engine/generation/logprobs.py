"""Log probabilities of sampled tokens, computed inside the step that draws them."""

from collections import deque
from typing import Any

import mlx.core as mx

from mlx_isolate_engine.completion.events import TokenLogprob
from mlx_isolate_engine.generation.sampling import Sampler
from mlx_isolate_engine.generation.vocabulary import Vocabulary


class LogprobSampler:
    """Wraps a row's sampler and notes the log probability of what it drew, with alternatives.

    The figures join the step's own graph and are scheduled with it: asked for later, they would
    wait behind the next step.

    Args:
        inner: the row's sampler.
        top: alternatives for each token, 0..20.
    """

    def __init__(self, inner: Sampler, top: int) -> None:
        self._inner = inner
        self._top = top
        self._noted: deque[tuple[Any, Any, Any]] = deque()

    def __call__(self, logprobs: Any) -> Any:
        """[1, vocabulary] to [1]."""
        drawn = self._inner(logprobs)
        values = logprobs.astype(mx.float32)
        chosen = mx.take_along_axis(values, drawn[:, None], axis=-1)
        top = min(self._top, values.shape[-1])
        if top:
            best = mx.argsort(-values, axis=-1)[:, :top]
            best_values = mx.take_along_axis(values, best, axis=-1)
        else:
            best, best_values = mx.zeros((1, 0), mx.uint32), mx.zeros((1, 0))
        schedule: Any = mx.async_eval
        schedule(chosen, best, best_values)
        self._noted.append((chosen, best, best_values))
        return drawn

    def pop(self, token: int, vocabulary: Vocabulary) -> TokenLogprob:
        """The note of the oldest draw, which gave `token`."""
        chosen, best, best_values = self._noted.popleft()
        alternatives = zip(best[0].tolist(), best_values[0].tolist(), strict=True)
        return _token_logprob(
            vocabulary,
            token,
            chosen.item(),
            tuple(_token_logprob(vocabulary, other, value) for other, value in alternatives),
        )


def _token_logprob(
    vocabulary: Vocabulary, token: int, value: float, top: tuple[TokenLogprob, ...] = ()
) -> TokenLogprob:
    raw = vocabulary.raw(token)
    return TokenLogprob(
        token=raw.decode("utf-8", "replace"),
        raw=raw,
        # -inf has no form in JSON; OpenAI's own answer for "as good as never" is this.
        logprob=max(min(value, 0.0), -9999.0),
        top=top,
    )
