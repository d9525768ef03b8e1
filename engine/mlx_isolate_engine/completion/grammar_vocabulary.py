"""A tokenizer's vocabulary in llguidance's terms; building it is slow and holds the interpreter.

llguidance's own way writes the tokenizer out as JSON and reads it again, all in one call: seconds
for a large vocabulary, in which no other stream of the engine moves. Where the bytes of all tokens
are known it is given those, in two calls, each of about a tenth of that time.
"""

from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer

from mlx_isolate_engine.generation.vocabulary import Vocabulary

# What is looked at apart from the rest when a mask is made: most tokens may stand in a JSON string.
# Of llguidance's own four these two make masks as fast, and take half as long to prepare.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+']
# Texts of which a tokenizer that adds or drops something gives other bytes than theirs.
_PROBES = ('{"a": [1, true]}', " b", "x", "}\n", '"é\u4e16"', "  ")


def grammar_vocabulary(tokenizer: Any, size: int) -> LLTokenizer:
    """The vocabulary that grammars are compiled for.

    Args:
        tokenizer: mlx_lm's TokenizerWrapper.
        size: width of the model's output.

    Raises:
        ValueError: a tokenizer of a kind that llguidance does not know.
    """
    ends = sorted(tokenizer.eos_token_ids)
    words = _Words(tokenizer, size)
    if not words.are_exact():
        return from_tokenizer(tokenizer._tokenizer, n_vocab=size, eos_token=ends)
    # In two calls, between which other threads get their turn.
    bare = LLTokenizer(TokenizerWrapper(words), eos_token=ends, slices=[])
    return bare.with_slices(_SLICES)


class _Words:
    """What llguidance asks of a tokenizer that it does not know: bytes by id, and ids of a text."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self._encode = tokenizer.encode
        vocabulary = Vocabulary(tokenizer)
        self._is_known = vocabulary.is_exact
        raw = [vocabulary.raw(token) for token in range(size)] if self._is_known else []
        # What only pads the model's output is called as llguidance calls it: no text has it.
        self.tokens: Sequence[bytes] = [
            each or f"<[{token}]>".encode() for token, each in enumerate(raw)
        ]
        self.eos_token_id: int = tokenizer.eos_token_id
        self.bos_token_id: int | None = tokenizer.bos_token_id
        # As llguidance reads a tokenizer: what is written like a tag is none of the text either.
        self.special_token_ids: Sequence[int] = [
            *(token for token, each in enumerate(raw) if not each),
            *(
                token
                for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()
                if token < size and (added.special or _is_tag(added.content))
            ),
        ]

    def are_exact(self) -> bool:
        """Whether a text's tokens are its bytes, no more and no less."""
        if not self._is_known:
            return False
        return all(
            b"".join(self.tokens[token] for token in self(text)) == text.encode()
            for text in _PROBES
        )

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text, without any at its ends."""
        if not isinstance(text, str):
            raise TypeError("a text is asked for")  # so does llguidance find out what it may ask
        ids: list[int] = self._encode(text, add_special_tokens=False)
        return ids


def _is_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")
