"""The vocabulary of grammars is the one that llguidance would make of the tokenizer itself."""

import random
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.utils import load_tokenizer

from mlx_isolate_engine.completion import grammar_vocabulary as module
from mlx_isolate_engine.completion.grammar_vocabulary import grammar_vocabulary

TEXTS = ['{"name": "x", "n": [1, 2, 3.5e7]}', "héllo 世界 🙂 <table>", "   \n\t", "<start_of_turn>"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"minimum": 1}}},
    "required": ["name", "ages"],
}


def expected(tokenizer: Any, size: int) -> LLTokenizer:
    inner = tokenizer._tokenizer
    return from_tokenizer(inner, n_vocab=size, eos_token=sorted(tokenizer.eos_token_ids))


def load(folder: Path) -> tuple[Any, int]:
    """A tokenizer, and how many tokens it has."""
    tokenizer: Any = load_tokenizer(folder)
    return tokenizer, len(tokenizer._tokenizer)


def check_same(ours: LLTokenizer, theirs: LLTokenizer) -> None:
    assert ours.vocab_size == theirs.vocab_size
    assert ours.eos_token == theirs.eos_token
    for token in range(ours.vocab_size):
        assert ours.is_special_token(token) == theirs.is_special_token(token), token
        assert ours.decode_bytes([token]) == theirs.decode_bytes([token]), token
    for text in TEXTS:
        assert ours.tokenize_str(text) == theirs.tokenize_str(text)
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA)
    draw = random.Random(1)
    for _ in range(5):
        mine, other = LLMatcher(ours, grammar), LLMatcher(theirs, grammar)
        for _ in range(40):
            mask = mine.compute_bitmask()
            assert mask == other.compute_bitmask()
            allowed = [
                token for token in range(ours.vocab_size) if mask[token // 8] >> token % 8 & 1
            ]
            token = draw.choice(allowed)
            assert mine.consume_token(token) and other.consume_token(token)
            if mine.is_stopped():
                break


def test_it_is_what_llguidance_makes_of_the_tokenizer(
    full_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, tokens = load(full_model)
    size = tokens + 7  # a model's output may be wider than its vocabulary
    theirs = expected(tokenizer, size)
    with monkeypatch.context() as without:
        without.setattr(module, "from_tokenizer", None)  # the slow way is not taken
        ours = grammar_vocabulary(tokenizer, size)
    check_same(ours, theirs)


@pytest.mark.slow
def test_it_is_so_of_a_large_vocabulary(demo_model: Path) -> None:
    tokenizer, tokens = load(demo_model)
    size = tokens + 64
    check_same(grammar_vocabulary(tokenizer, size), expected(tokenizer, size))


def test_a_tokenizer_that_adds_to_a_text_is_left_to_llguidance(full_model: Path) -> None:
    tokenizer, size = load(full_model)

    class Adding:
        """As tokenizers that put a space before every text."""

        def encode(self, text: str, **options: Any) -> list[int]:
            ids: list[int] = tokenizer.encode(" " + text, **options)
            return ids

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    check_same(grammar_vocabulary(Adding(), size), expected(tokenizer, size))
