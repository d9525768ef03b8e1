"""continue_final_message: a cut answer goes on where it stopped."""

import json
from typing import Any

import pytest

from mlx_isolate_engine.completion.request import ChatPrompt
from mlx_isolate_engine.protocols import chat
from mlx_isolate_shared.errors import RequestError
from tests.fakes.scripted_service import CALL

USER = {"role": "user", "content": "hi"}
CUT = {"role": "assistant", "content": "Once upon"}


def prompt_of(*messages: Any) -> ChatPrompt:
    body = {"messages": messages, "continue_final_message": True}
    prompt = chat.parse(json.dumps(body).encode(), CALL).completions[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_cut_answer_is_handed_to_the_template_to_go_on() -> None:
    assert prompt_of(USER, CUT).template_kwargs == {"continue_final_message": True}


def test_no_continuation_unless_asked_for() -> None:
    body = json.dumps({"messages": [USER, CUT], "continue_final_message": False})
    prompt = chat.parse(body.encode(), CALL).completions[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {}


@pytest.mark.parametrize("last", [USER, {"role": "assistant", "content": ""}])
def test_nothing_to_go_on_from_is_refused_by_name(last: Any) -> None:
    with pytest.raises(RequestError) as refused:
        prompt_of(USER, last)
    assert refused.value.param == "continue_final_message"
