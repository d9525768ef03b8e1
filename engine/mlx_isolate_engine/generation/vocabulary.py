"""What each token id stands for, in bytes, for every kind of tokenizer."""

from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer

from mlx_isolate_engine.generation.decoding import ByteDecoder, StreamDecoder


class Vocabulary:
    """Bytes of every token.

    Byte-level and sentencepiece vocabularies are known exactly, from the maps that mlx-lm has
    built for its own detokenizers. Any other kind of tokenizer is asked to decode.

    Args:
        tokenizer: mlx_lm's TokenizerWrapper.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._raw: dict[int, bytes] = {}
        detokenizer = tokenizer.detokenizer
        self._pieces: list[Any] | None = None
        self._is_byte_level = isinstance(detokenizer, BPEStreamingDetokenizer)
        if isinstance(detokenizer, BPEStreamingDetokenizer | SPMStreamingDetokenizer):
            self._pieces = detokenizer.tokenmap
        self._added: dict[int, bytes] = {
            token: added.content.encode()
            for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }
        # A tokenizer of Llama's first kind marks the start of a text with a space.
        self.marks_start_with_space = isinstance(detokenizer, SPMStreamingDetokenizer) and bool(
            detokenizer.trim_space
        )

    @property
    def is_exact(self) -> bool:
        """Whether the bytes of every token are known, and no tokenizer has to be asked."""
        return self._pieces is not None

    def raw(self, token: int) -> bytes:
        """Exact bytes of a token; b"" for an id that only pads the model's output."""
        raw = self._raw.get(token)
        if raw is None:
            raw = self._raw[token] = self._find_raw(token)
        return raw

    def decoder(self) -> StreamDecoder:
        """A fresh decoder for one completion."""
        if self._pieces is None:
            return _AskingDecoder(self._tokenizer)
        return ByteDecoder(self.raw)

    def _find_raw(self, token: int) -> bytes:
        if self._pieces is None:
            return str(self._tokenizer.decode([token])).encode("utf-8", "replace")
        if not 0 <= token < len(self._pieces):
            return b""
        piece = self._pieces[token]
        if self._is_byte_level:
            return self._added.get(token) or _from_byte_level(piece or "")
        return self._added.get(token) or bytes(piece).replace("\u2581".encode(), b" ")


class _AskingDecoder:
    """For tokenizers whose text is not the sum of its tokens: mlx-lm's own detokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = tokenizer.detokenizer
        self.pending = 0

    def add(self, token: int) -> str:
        self._detokenizer.add_token(token)
        text = str(self._detokenizer.last_segment)
        self.pending = self.pending + 1 if not text else 0
        return text

    def flush(self) -> str:
        self._detokenizer.finalize()
        return str(self._detokenizer.last_segment)


def _byte_of_char() -> dict[str, int]:
    """The characters with which byte-level vocabularies write bytes (GPT-2's table)."""
    written_as_itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in written_as_itself}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _from_byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    except KeyError:
        return piece.encode()  # Not written in the table: a token that stands for itself.
