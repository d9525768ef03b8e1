"""The tiny models as mlx-lm loads them: their cache kinds, their texts, the parrot's promises."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.material.models import (
    CACHE_LIST,
    FULL,
    HYBRID,
    PARROT,
    RECURRENT,
    SHARED_KV,
    SLIDING,
    ModelSpec,
)

Folder = Callable[[ModelSpec], Path]
Message = dict[str, str]


def said(folder: Path, messages: list[Message], max_tokens: int = 200) -> tuple[str, str, float]:
    """Greedy text, finish reason and the least log probability of a chosen token."""
    model, tokenizer, *_ = mlx_lm.load(str(folder))
    wrapped: Any = tokenizer
    prompt = wrapped.apply_chat_template(messages, add_generation_prompt=True)
    replies = list(mlx_lm.stream_generate(model, wrapped, prompt, max_tokens=max_tokens))
    least = min(float(reply.logprobs[reply.token]) for reply in replies)
    return "".join(reply.text for reply in replies), str(replies[-1].finish_reason), least


@pytest.mark.parametrize(
    ("spec", "kinds", "layers"),
    [
        (FULL, ["KVCache"] * 2, 2),
        (SLIDING, ["RotatingKVCache", "KVCache"] * 2, 4),
        (RECURRENT, ["ArraysCache"] * 2, 2),
        (HYBRID, ["ArraysCache", "KVCache"], 2),
        (CACHE_LIST, ["CacheList"] * 2, 2),
        (SHARED_KV, ["RotatingKVCache", "KVCache"], 4),
    ],
    ids=lambda value: value.kind if isinstance(value, ModelSpec) else "",
)
def test_each_kind_has_its_caches(
    model_folder: Folder, spec: ModelSpec, kinds: list[str], layers: int
) -> None:
    model: Any = mlx_lm.load(str(model_folder(spec)))[0]
    assert [type(cache).__name__ for cache in make_prompt_cache(model)] == kinds
    assert len(model.layers) == layers


@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent", "hybrid", "shared_kv"])
def test_random_models_write_printable_text_without_end(model_folder: Folder, kind: Any) -> None:
    text, reason, _ = said(model_folder(ModelSpec(kind=kind)), [{"role": "user", "content": "x"}])
    assert reason == "length"
    assert text.isascii()
    assert text.replace("\n", "").isprintable()


SENTENCES = [
    "Grüße, 世界! 🎉🎉 The end of the hello world.",
    "AAA? ^_^ {}[]()",
    "x",
    "line one\nline two\n\n  indented",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_parrot_repeats_the_assistant_and_ends(model_folder: Folder, sentence: str) -> None:
    messages = [
        {"role": "system", "content": "You are a parrot. " * 8},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": sentence},
        {"role": "user", "content": "again"},
    ]
    text, reason, least = said(model_folder(PARROT), messages)
    assert (text, reason) == (sentence, "stop")
    assert least > math.log(0.999)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_parrot_without_an_answer_repeats_the_user(model_folder: Folder, sentence: str) -> None:
    text, reason, least = said(model_folder(PARROT), [{"role": "user", "content": sentence}])
    assert (text, reason) == (sentence, "stop")
    assert least > math.log(0.999)


def test_parrot_repeats_a_tool_call(model_folder: Folder) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    folder = model_folder(ModelSpec(kind="parrot", template="tools", context=8192))
    text, reason, _ = said(folder, [{"role": "user", "content": call}])
    assert (text, reason) == (call, "stop")


def test_tool_calls_of_earlier_turns_are_rendered(model_folder: Folder) -> None:
    folder = model_folder(ModelSpec(kind="parrot", template="tools", context=8192))
    tokenizer: Any = mlx_lm.load(str(folder))[1]
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert text == f"<|bos|><|user|>x<|end|><|assistant|>{call}<|end|>"
    assert tokenizer.has_tool_calling


def test_thinking_template_opens_or_closes_the_block(model_folder: Folder) -> None:
    folder = model_folder(ModelSpec(kind="parrot", template="thinking", context=8192))
    tokenizer: Any = mlx_lm.load(str(folder))[1]
    assert tokenizer.has_thinking

    def prompt(**kwargs: bool) -> str:
        messages = [{"role": "user", "content": "x"}]
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **kwargs
        )
        return text.removeprefix("<|bos|><|user|>x<|end|><|assistant|>")

    assert prompt() == ""
    assert prompt(open_thinking=True) == "<think>\n"
    assert prompt(enable_thinking=False) == "<think>\n\n</think>\n\n"


def test_parrot_repeats_over_a_thousand_tokens(model_folder: Folder) -> None:
    messages = [
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "The answer is 42."},
        {"role": "user", "content": "z" * 1000 + " and again"},
    ]
    text, reason, _ = said(model_folder(PARROT), messages)
    assert (text, reason) == ("The answer is 42.", "stop")
