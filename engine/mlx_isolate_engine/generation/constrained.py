"""A logits processor that lets through only what a grammar allows next."""

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_isolate_engine.generation.plan import Constraint


class ConstraintFailedError(Exception):
    """The grammar gave up on this row (too complex, or a token it had not allowed)."""


class ConstraintProcessor:
    """One row's position in its grammar.

    A step is built before the token of the step before has been computed, and the grammar needs
    that token: so the step's forward pass is started first, then the token is awaited, and the
    next mask is made while the pass runs.

    Args:
        constraint: compiled; copied here, since a matcher has a position.
        vocabulary_size: width of the logits.
    """

    def __init__(self, constraint: Constraint, vocabulary_size: int) -> None:
        self._matcher = constraint.matcher.deep_copy()
        self._after = list(constraint.after)
        self._recent: list[int] = []
        self._vocabulary_size = vocabulary_size
        self._has_begun = False

    def __call__(self, tokens: Any, logits: Any) -> Any:
        """Logits [1, vocabulary] with everything that is not allowed at -inf."""
        schedule: Any = mx.async_eval
        schedule(logits)
        if self._has_begun:
            self._accept(int(tokens[-1].item()))
        self._has_begun = True
        if self._after:
            return logits
        return mx.where(self._allowed(), logits, -mx.inf)

    def _accept(self, token: int) -> None:
        if self._after:
            self._recent = [*self._recent, token][-len(self._after) :]
            if self._recent == self._after:
                self._after = []
            return
        # A grammar that is complete allows nothing but an end token; and of a row that has ended
        # one more step is built, whose result nobody takes.
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailedError(self._matcher.get_error())

    def _allowed(self) -> Any:
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(mask, bitorder="little", count=self._vocabulary_size)
        allowed: Any = bits.astype(np.bool_)
        return mx.array(allowed)[None]
