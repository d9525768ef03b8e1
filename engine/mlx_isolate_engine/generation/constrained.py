"""Logits processors that let through only what a grammar allows next.

A step is built before the token of the step before has been computed, and a grammar needs that
token: so the step's forward pass is started first, then the token is awaited, and the next mask is
made while the pass runs.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_isolate_engine.generation.plan import AwaitedMarker, CallConstraint, Constraint


class ConstraintFailedError(Exception):
    """The grammar gave up on this row (too complex, or a token it had not allowed)."""


class _Position:
    """A row's position in a grammar.

    Args:
        matcher: at its start; copied, since it has a position.
        vocabulary_size: width of the logits.
    """

    def __init__(self, matcher: Any, vocabulary_size: int) -> None:
        self._matcher = matcher.deep_copy()
        self._vocabulary_size = vocabulary_size

    @property
    def is_complete(self) -> bool:
        """Whether what has been written may end here."""
        return bool(self._matcher.is_accepting())

    def accept(self, token: int) -> None:
        # A grammar that is complete allows nothing but an end token; and of a row that has ended
        # one more step is built, whose result nobody takes.
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
        self._check()

    def only_allowed(self, logits: Any) -> Any:
        """Logits [1, vocabulary] with everything that is not allowed at -inf."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(mask, bitorder="little", count=self._vocabulary_size)
        allowed: Any = bits.astype(np.bool_)
        return mx.where(mx.array(allowed)[None], logits, -mx.inf)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailedError(self._matcher.get_error())


class _Processor:
    """What both have in common: which token is awaited, and when."""

    _has_begun = False

    def __call__(self, tokens: Any, logits: Any) -> Any:
        """Logits [1, vocabulary] with everything that is not allowed at -inf."""
        schedule: Any = mx.async_eval
        schedule(logits)
        if self._has_begun:
            self._accept(int(tokens[-1].item()))
        self._has_begun = True
        return self._held(logits)

    def _accept(self, token: int) -> None:
        raise NotImplementedError

    def _held(self, logits: Any) -> Any:
        raise NotImplementedError


class _Watch:
    """Waits for a marker in what a row writes, in whatever tokens it comes.

    Args:
        marker: the text and the tokens that would run over it.
        vocabulary_size: width of the logits.
        raw: bytes of a token.
    """

    def __init__(
        self, marker: AwaitedMarker, vocabulary_size: int, raw: Callable[[int], bytes]
    ) -> None:
        self._marker = marker
        self._vocabulary_size = vocabulary_size
        self._raw = raw
        self._tail = b""

    def has_come(self, token: int) -> bool:
        """Whether `token` completes the marker; then it is waited for anew."""
        text = self._marker.text
        self._tail = (self._tail + self._raw(token))[-len(text) :]
        if self._tail != text:
            return False
        self._tail = b""
        return True

    def held(self, logits: Any) -> Any:
        """Logits [1, vocabulary] without the tokens that would run over the marker."""
        overruns = [
            token
            for written, overruns in enumerate(self._marker.overruns)
            if self._tail.endswith(self._marker.text[:written])
            for token in overruns
        ]
        if not overruns:
            return logits
        allowed: Any = np.ones(self._vocabulary_size, dtype=np.bool_)
        allowed[overruns] = False
        return mx.where(mx.array(allowed)[None], logits, -mx.inf)


class ConstraintProcessor(_Processor):
    """Holds one row's whole answer to a grammar.

    Args:
        constraint: compiled.
        vocabulary_size: width of the logits.
        raw: bytes of a token.
    """

    def __init__(
        self, constraint: Constraint, vocabulary_size: int, raw: Callable[[int], bytes]
    ) -> None:
        self._position = _Position(constraint.matcher, vocabulary_size)
        after = constraint.after
        self._watch = None if after is None else _Watch(after, vocabulary_size, raw)

    def _held(self, logits: Any) -> Any:
        if self._watch is not None:
            return self._watch.held(logits)
        return self._position.only_allowed(logits)

    def _accept(self, token: int) -> None:
        if self._watch is None:
            self._position.accept(token)
        elif self._watch.has_come(token):
            self._watch = None


class CallProcessor(_Processor):
    """Holds each tool call of one row to a grammar; outside of calls the row is as free as ever.

    Args:
        constraint: compiled.
        vocabulary_size: width of the logits.
        raw: bytes of a token.
    """

    def __init__(
        self, constraint: CallConstraint, vocabulary_size: int, raw: Callable[[int], bytes]
    ) -> None:
        self._constraint = constraint
        self._vocabulary_size = vocabulary_size
        self._watch = _Watch(constraint.opening, vocabulary_size, raw)
        self._call: _Position | None = None

    def _held(self, logits: Any) -> Any:
        return self._watch.held(logits) if self._call is None else self._call.only_allowed(logits)

    def _accept(self, token: int) -> None:
        if self._call is not None:
            self._call.accept(token)
            if self._call.is_complete:
                self._call = None
        elif self._watch.has_come(token):
            self._call = _Position(self._constraint.matcher, self._vocabulary_size)
