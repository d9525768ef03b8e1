"""The conformance tables say what is so: ignored is ignored, refused is refused, answers fit."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from mlx_isolate_engine.completion.events import ContentDelta, ReasoningDelta, ToolCallDelta
from mlx_isolate_shared.errors import RequestError
from tests.architecture.beyond import BEYOND, beyond
from tests.architecture.conformance import APIS, Api, answer
from tests.fakes.scripted_service import summary

IGNORED = [pytest.param(api, name, id=f"{api.path}-{name}") for api in APIS for name in api.ignored]
REFUSED = [pytest.param(api, name, id=f"{api.path}-{name}") for api in APIS for name in api.refused]
by_path = pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)


@pytest.mark.parametrize(("api", "name"), IGNORED)
def test_ignored_field_changes_nothing(api: Api, name: str) -> None:
    plain = api.parse(api.body())
    values: list[Any] = [None, "x", 1, True, [], {"type": "auto"}]
    for value in values:
        request = api.parse(api.body(**{name: value}))
        assert request.completions == plain.completions
        assert request.stream == plain.stream


@pytest.mark.parametrize(("api", "name"), REFUSED)
def test_refused_field_is_named(api: Api, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        api.parse(api.body(**{name: api.refused[name]}))
    assert caught.value.status == 400
    assert name in (caught.value.param or "") + caught.value.message
    assert api.parse(api.body(**{name: None})).completions == api.parse(api.body()).completions


@by_path
def test_every_field_is_in_one_table(api: Api) -> None:
    tables = [*api.supported, *api.refused, *api.ignored]
    assert sorted(tables) == api.fields


def test_every_field_beyond_the_clients_types_is_in_the_table_of_those() -> None:
    assert {name for api in APIS for name in beyond(api.path, api.fields)} == set(BEYOND)


@by_path
def test_answer_is_what_the_client_types(api: Api) -> None:
    api.answers[0].model_validate(answer(api), strict=True)


def test_chat_chunks_are_what_the_client_types() -> None:
    (api,) = [one for one in APIS if one.path == "/v1/chat/completions"]
    request = api.parse(api.body(stream=True, stream_options={"include_usage": True}))
    streamer = request.streamer()
    events = [*streamer.begin(7)]
    for delta in (
        ReasoningDelta(text="hm"),
        ContentDelta(text="a"),
        ToolCallDelta(index=0, id="c", name="f", arguments="{}"),
    ):
        events += streamer.delta(0, delta)
    events += [*streamer.finish(0, summary()), *streamer.end()]
    for event in events[:-1]:
        ChatCompletionChunk.model_validate(json.loads(event[6:]), strict=True)
