"""Which stored token sequence helps a prompt most: a sorted index, pure and without a model.

In lexicographic order the sequence that shares the longest prefix with a query stands right beside
the query's place, so one bisection finds it; sequences that are themselves prefixes are found by
bisecting again on the part that matched.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

Value = TypeVar("Value")


def token_key(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes whose order is that of the tokens (big-endian 32 bit)."""
    return np.asarray(tokens, dtype=">u4").tobytes()


def key_length(key: bytes) -> int:
    """Tokens in a key."""
    return len(key) // 4


def common_prefix(a: bytes, b: bytes) -> int:
    """Tokens that two keys share from the start."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // 4
    left = np.frombuffer(a, dtype=np.uint32, count=size // 4)
    right = np.frombuffer(b, dtype=np.uint32, count=size // 4)
    return int(np.argmax(left != right))


@dataclass(frozen=True, kw_only=True)
class Match(Generic[Value]):
    """An entry that helps, and how many tokens of the query it stands for."""

    value: Value
    length: int


class TokenIndex(Generic[Value]):
    """Entries of one namespace by exact tokens; at most one value a sequence."""

    def __init__(self) -> None:
        self._values: dict[bytes, Value] = {}
        self._cuttable: list[bytes] = []
        self._fixed: list[bytes] = []

    def __len__(self) -> int:
        """Sequences held."""
        return len(self._values)

    def get(self, key: bytes) -> Value | None:
        """The value of exactly this sequence."""
        return self._values.get(key)

    def add(self, key: bytes, value: Value, *, cuttable: bool) -> Value | None:
        """Insert or replace; returns what was there under the same tokens."""
        previous = self.remove(key)
        self._values[key] = value
        bisect.insort(self._cuttable if cuttable else self._fixed, key)
        return previous

    def remove(self, key: bytes) -> Value | None:
        """Take a sequence out; returns its value, None if it was not there."""
        for keys in (self._cuttable, self._fixed):
            place = bisect.bisect_left(keys, key)
            if place < len(keys) and keys[place] == key:
                del keys[place]
        return self._values.pop(key, None)

    def find(self, query: bytes, *, length_max: int) -> Match[Value] | None:
        """The entry that stands for most tokens of `query`, at most `length_max` of them."""
        best: Match[Value] | None = None
        place = bisect.bisect_left(self._cuttable, query)
        for key in self._cuttable[max(0, place - 1) : place + 1]:
            length = min(common_prefix(key, query), length_max)
            if length > (best.length if best else 0):
                best = Match(value=self._values[key], length=length)
        for key in self._prefixes(self._fixed, query[: 4 * length_max]):
            if key_length(key) > (best.length if best else 0):
                best = Match(value=self._values[key], length=key_length(key))
            break
        return best

    def prefixes(self, key: bytes) -> list[bytes]:
        """Stored sequences that `key` begins with, other than itself, longest first."""
        found = [*self._prefixes(self._cuttable, key), *self._prefixes(self._fixed, key)]
        return sorted((k for k in found if k != key), key=len, reverse=True)

    def longest_shared(self, query: bytes) -> int:
        """Tokens that any stored sequence shares with the query, usable or not."""
        shared = 0
        for keys in (self._cuttable, self._fixed):
            place = bisect.bisect_left(keys, query)
            for key in keys[max(0, place - 1) : place + 1]:
                shared = max(shared, common_prefix(key, query))
        return shared

    @staticmethod
    def _prefixes(keys: list[bytes], query: bytes) -> Iterable[bytes]:
        """Keys that are prefixes of query (or equal), longest first."""
        high = len(keys)
        while query:
            high = bisect.bisect_right(keys, query, hi=high)
            if high == 0:
                return
            shared = common_prefix(keys[high - 1], query)
            if 4 * shared == len(keys[high - 1]):
                yield keys[high - 1]
                high -= 1
                shared = min(shared, len(query) // 4)
                if 4 * shared == len(query):
                    query = query[:-4]
                    continue
            query = query[: 4 * shared]
