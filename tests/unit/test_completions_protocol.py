"""The text completions protocol: golden bytes, prompts of every form, old logprobs."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_isolate_engine.completion.events import ContentDelta, TokenLogprob
from mlx_isolate_engine.completion.request import TextPrompt, TokensPrompt
from mlx_isolate_engine.protocols import completions
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.errors import RequestError
from tests.fakes.scripted_service import CALL, summary


def parse(prompt: Any = "p", **fields: Any) -> completions.TextRequest:
    return completions.parse(json.dumps({"prompt": prompt, **fields}).encode(), CALL)


def transcripts(request: completions.TextRequest, delta: ContentDelta) -> Sequence[Transcript]:
    result = []
    for _ in request.completions:
        transcript = Transcript()
        transcript.add(delta)
        transcript.end(summary())
        result.append(transcript)
    return result


@pytest.mark.case("31")
def test_stream_is_byte_for_byte_as_documented() -> None:
    streamer = parse(stream=True).streamer()
    events = [
        *streamer.begin(7),
        *streamer.delta(0, ContentDelta(text="a")),
        *streamer.finish(0, summary("length")),
        *streamer.end(),
    ]
    head = (
        b'data: {"id":"cmpl-0","object":"text_completion","created":2,"model":"m",'
        b'"system_fingerprint":"fp_0","choices":[{"text":'
    )
    assert events[0] == head + b'"a","index":0,"logprobs":null,"finish_reason":null}]}\n\n'
    assert events[1].startswith(
        head + b'"","index":0,"logprobs":null,"finish_reason":"length"}],"timings":{'
    )
    assert events[2:] == [b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt(text="a")]),
        (["a", "b"], [TextPrompt(text="a"), TextPrompt(text="b")]),
        ([1, 2], [TokensPrompt(tokens=(1, 2))]),
        ([[1], [2, 3]], [TokensPrompt(tokens=(1,)), TokensPrompt(tokens=(2, 3))]),
    ],
)
def test_prompts(prompt: Any, expected: list[Any]) -> None:
    assert [one.prompt for one in parse(prompt).completions] == expected


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], ["a", 1], [[1], "a"], [[]], ["a"] * 65, 5, {}]
)
def test_bad_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "s"), ("best_of", 3), ("logprobs", 21), ("logprobs", True), ("n", 0)],
)
def test_what_the_model_cannot_is_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**{field: value})
    assert caught.value.param == field


def test_prompts_times_choices_are_indexed_and_counted_once_each() -> None:
    request = parse(["a", "b"], n=2, echo=True)
    answer = json.loads(request.body(transcripts(request, ContentDelta(text="!"))))
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [
        (0, "a!"),
        (1, "a!"),
        (2, "b!"),
        (3, "b!"),
    ]
    assert answer["usage"]["prompt_tokens"] == 14
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.case("43")
def test_logprobs_in_the_old_shape() -> None:
    other = TokenLogprob(token="x", raw=b"x", logprob=-2.0)
    tokens = tuple(
        TokenLogprob(token=text, raw=text.encode(), logprob=-0.5, top=(other,)) for text in "ab"
    )
    request = parse(logprobs=1, stream=True)
    delta = ContentDelta(text="ab", logprobs=tokens)
    expected = {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"x": -2.0}, {"x": -2.0}],
        "text_offset": [0, 1],
    }
    answer = json.loads(request.body(transcripts(request, delta)))
    assert answer["choices"][0]["logprobs"] == expected
    streamer = request.streamer()
    (first,) = streamer.delta(0, delta)
    (second,) = streamer.delta(0, delta)
    assert json.loads(first[6:])["choices"][0]["logprobs"] == expected
    assert json.loads(second[6:])["choices"][0]["logprobs"]["text_offset"] == [2, 3]
