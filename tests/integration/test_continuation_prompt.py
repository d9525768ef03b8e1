"""The prompt of a continued answer ends with what the answer had, and opens no new turn."""

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from mlx_isolate_engine.completion.prompt import PromptBuilder
from mlx_isolate_engine.completion.request import ChatPrompt, CompletionRequest

USER = {"role": "user", "content": "abc"}


def tokens_of(tokenizer: Any, *messages: Any, go_on: bool = False) -> list[int]:
    builder = PromptBuilder(
        tokenizer,
        template_args={},
        use_default_template=False,
        context_length=4096,
        checkpoint_kinds=frozenset({"system", "history"}),
    )
    arguments = {"continue_final_message": True} if go_on else {}
    prompt = ChatPrompt(messages=messages, template_kwargs=arguments)
    return builder.build(CompletionRequest(request_id="r", prompt=prompt)).plan.tokens


@pytest.mark.case("x6")
def test_continued_prompt_is_the_first_one_with_the_cut_answer_behind_it(
    parrot_model: Path,
) -> None:
    tokenizer = load_tokenizer(parrot_model)
    asked = tokens_of(tokenizer, USER)
    cut = {"role": "assistant", "content": "def gh"}
    continued = tokens_of(tokenizer, USER, cut, go_on=True)
    assert continued[: len(asked)] == asked
    assert tokenizer.decode(continued[len(asked) :]) == "def gh"
