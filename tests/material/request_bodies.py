"""Hypothesis strategies for request bodies: well-formed ones, and ones with anything in a field."""

import json
from typing import Any

import msgspec
from hypothesis import strategies as st

from mlx_isolate_engine.protocols.anthropic_request import MessagesBody
from mlx_isolate_engine.protocols.chat import ChatBody
from mlx_isolate_engine.protocols.completions import CompletionsBody
from mlx_isolate_engine.protocols.fields import LaneBody, SamplingBody
from mlx_isolate_engine.protocols.responses_request import ResponsesBody

# The struct that each path's body is read into.
SHAPES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionsBody,
    "/v1/messages": MessagesBody,
    "/v1/responses": ResponsesBody,
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)
_ROLE = st.sampled_from(["user", "system", "assistant", "tool", "developer", "foo"])
_TEXT = st.text(max_size=12)
_PART = st.fixed_dictionaries({}, optional={"type": JSON | st.just("text"), "text": JSON})
_TEXT_PART = st.fixed_dictionaries({"type": st.just("text"), "text": _TEXT})
_MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": _ROLE | JSON,
        "content": _TEXT | st.lists(_PART | JSON, max_size=3) | JSON,
        "tool_calls": JSON,
        "name": JSON,
    },
)
_GOOD_MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant"]),
        "content": _TEXT | st.lists(_TEXT_PART, max_size=3),
    }
)
_ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]),
        "role": _ROLE,
        "content": _TEXT | st.lists(_PART, max_size=3),
        "name": _TEXT,
        "arguments": _TEXT,
        "output": _TEXT,
    },
)
_PROMPTS: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(_GOOD_MESSAGE, min_size=1, max_size=3) | st.lists(_MESSAGE, max_size=3),
    "prompt": st.text(min_size=1, max_size=20)
    | st.sampled_from([["p", "q"], ["p", 1], [[1, 2]], [1, 2, 3], [10**6], [""]]),
    "input": _TEXT | st.lists(_ITEM, max_size=3),
}
_TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
# Values that a field may really have, drawn more often than anything else.
_GOOD: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 8),
    "max_completion_tokens": st.integers(1, 8),
    "max_output_tokens": st.integers(1, 8),
    "n": st.integers(1, 3),
    "stop": st.sampled_from(["x", ["a", "the"], []]),
    "stop_sequences": st.sampled_from([["x"], []]),
    "stream": st.booleans(),
    "stream_options": st.sampled_from([{"include_usage": True}, {}]),
    "logprobs": st.booleans() | st.integers(0, 5),
    "top_logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "tools": st.sampled_from([[], [{"type": "function", "function": _TOOL}], [_TOOL]]),
    "tool_choice": st.sampled_from(["auto", "none", {"type": "auto"}]),
    "temperature": st.floats(0, 1),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 600),
    "min_p": st.floats(0, 1),
    "xtc_probability": st.floats(0, 1),
    "xtc_threshold": st.floats(0, 0.5),
    "repetition_penalty": st.floats(0.1, 3),
    "repetition_context_size": st.integers(0, 50),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 600).map(str), st.floats(-100, 100), max_size=3),
    "seed": st.integers(-1, 2**40),
}


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """Bodies for `path`: mostly a good prompt, a few fields with good values or with anything.

    Every one that asks for tokens asks for few.
    """
    shape = SHAPES[path]
    names = [*shape.__struct_fields__]
    if shape is not MessagesBody:
        names += [*SamplingBody.__struct_fields__, *LaneBody.__struct_fields__]
    prompt = next(name for name in _PROMPTS if name in names)
    limit = "max_output_tokens" if shape is ResponsesBody else "max_tokens"
    fields = st.lists(
        st.sampled_from(names).flatmap(
            lambda name: st.tuples(
                st.just(name), _GOOD.get(name, JSON) | _GOOD.get(name, JSON) | JSON
            )
        ),
        max_size=5,
    )
    return st.builds(
        _body,
        st.fixed_dictionaries({prompt: _PROMPTS[prompt], limit: st.integers(1, 8)}),
        fields,
        st.just(limit),
    )


def _body(prompt: dict[str, Any], fields: list[tuple[str, Any]], limit: str) -> bytes:
    body = {**prompt, **dict(fields)}
    if isinstance(body[limit], int | float) and not isinstance(body[limit], bool):
        # What is no number, or no number of tokens, stays as it is.
        body[limit] = min(body[limit], 8)
    if body[limit] in (None, -1):
        body[limit] = 8
    return json.dumps(body).encode()
