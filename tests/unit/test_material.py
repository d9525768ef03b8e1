"""The test material itself: the tokenizer's bytes and the parrot's arithmetic, without a model."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.material.models import PARROT, ModelSpec, build_model
from tests.material.parrot import token_codes
from tests.material.tokenizer import (
    ASSISTANT,
    END,
    SPECIAL_TOKENS,
    THINKING_TOKENS,
    TOOL_CALL_TOKENS,
    USER,
    merge_texts,
)

TEXTS = ["hello world", "Grüße, 世界! 🎉", "".join(map(chr, range(256))), "a\n\n b\t", "<|end|>"]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_gives_every_text_back(tmp_path: Path, text: str) -> None:
    build_model(tmp_path, PARROT)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode(text).ids
    assert max(tokens) < 512
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_turn_markers_are_single_tokens(tmp_path: Path) -> None:
    build_model(tmp_path, PARROT)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|user|>A<|end|><|assistant|>").ids == [USER, 65, END, ASSISTANT]


def test_equal_specs_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_model(tmp_path / name, ModelSpec(kind="full", seed=3))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]


def test_codes_of_the_parrot_are_told_apart() -> None:
    used = [*range(256), *SPECIAL_TOKENS, *THINKING_TOKENS, *TOOL_CALL_TOKENS, *merge_texts()]
    codes = token_codes()[used]
    user, assistant = used.index(USER), used.index(ASSISTANT)
    likeness = codes @ codes.T / 3
    assert np.allclose(np.diag(likeness), 1.0)
    np.fill_diagonal(likeness, 0.0)
    assert np.isclose(likeness[user, assistant], 0.75)
    likeness[user, assistant] = likeness[assistant, user] = 0.0
    assert likeness.max() < 0.67
