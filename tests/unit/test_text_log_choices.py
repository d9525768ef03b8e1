"""What is logged of one request's texts: its prompt once, and each choice and call told apart."""

import asyncio

import pytest

from mlx_isolate_engine.completion.events import CompletionSummary, ContentDelta, Event
from mlx_isolate_engine.completion.events import ToolCallDelta as Call
from mlx_isolate_engine.completion.request import CompletionRequest, TextPrompt
from mlx_isolate_engine.completion.seam import PreparedCompletion, Sink
from mlx_isolate_engine.completion.text_log import GROUPS_MAX, TextLog
from tests.fakes.scripted_service import summary

PROMPT = '"{\\"text\\": \\"hi\\"}"'


class Saying:
    """A service, and all of its completions, that tells the same events each time."""

    prompt_tokens = 1
    notices: tuple[str, ...] = ()

    def __init__(self, *events: Event) -> None:
        self._events = events

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        return self

    async def count_tokens(self, request: CompletionRequest) -> int:
        return 1

    async def execute(self, sink: Sink) -> CompletionSummary:
        for event in self._events:
            await sink(event)
        return summary()

    async def close(self) -> None:
        pass


def logged(
    caplog: pytest.LogCaptureFixture, events: tuple[Event, ...], groups: tuple[str | None, ...]
) -> list[str]:
    """The lines about completions of these groups, each prepared in turn and then run."""

    async def sink(event: Event) -> None:
        pass

    async def run() -> None:
        service = TextLog(Saying(*events))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        prepared = [
            await service.prepare(
                CompletionRequest(request_id="r", prompt=TextPrompt(text="hi"), group=group)
            )
            for group in groups
        ]
        await asyncio.gather(*(completion.execute(sink) for completion in prepared))

    with caplog.at_level("INFO"):
        asyncio.run(run())
    return [record.getMessage() for record in caplog.records if "text." in record.getMessage()]


def test_choices_share_one_prompt_and_are_numbered(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, (ContentDelta(text="a"),), ("g", "h", "g", "g")) == [
        f"text.prompt request=r {PROMPT}",
        f"text.prompt request=r {PROMPT}",
        'text.answer request=r choice=0 "a"',
        'text.answer request=r choice=0 "a"',
        'text.answer request=r choice=1 "a"',
        'text.answer request=r choice=2 "a"',
    ]


def test_a_request_with_one_answer_has_no_numbers(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, (ContentDelta(text="a"),), (None,)) == [
        f"text.prompt request=r {PROMPT}",
        'text.answer request=r "a"',
    ]


def test_what_is_remembered_of_groups_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    groups = tuple(f"g{number}" for number in range(GROUPS_MAX + 1))
    lines = logged(caplog, (), (*groups, "g1", "g0"))
    assert len(lines) == GROUPS_MAX + 2  # of all, g0 alone was forgotten


def test_calls_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    events = (
        Call(index=0, id="1", name="f", arguments='{"a":'),
        Call(index=0, arguments="1}"),
        Call(index=1, id="2", name="g", arguments="{}"),
    )
    assert logged(caplog, events, (None,))[1] == r'text.tool_call request=r "f {\"a\":1}\ng {}"'
