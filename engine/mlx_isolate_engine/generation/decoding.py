"""Bytes that arrive token by token become characters, each given out when it is complete."""

import codecs
from collections.abc import Callable
from typing import Protocol


class StreamDecoder(Protocol):
    """Text of one completion, as its tokens arrive."""

    def add(self, token: int) -> str:
        """The characters that `token` completes."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut."""
        ...

    @property
    def pending(self) -> int:
        """Bytes of a character that has begun and is not complete."""
        ...


class ByteDecoder:
    """Decodes UTF-8; bytes that belong to no character become U+FFFD.

    Args:
        raw: the bytes of a token.
    """

    def __init__(self, raw: Callable[[int], bytes]) -> None:
        self._raw = raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The characters that `token` completes."""
        return self._decoder.decode(self._raw(token))

    def flush(self) -> str:
        """U+FFFD if a character was cut."""
        return self._decoder.decode(b"", True)

    @property
    def pending(self) -> int:
        """Bytes of a character that has begun and is not complete."""
        return len(self._decoder.getstate()[0])
