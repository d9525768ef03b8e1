"""A stream that the engine itself ends with an error event counts as what the event says."""

import pytest

from mlx_isolate_shared.anthropic_error import anthropic_event
from mlx_isolate_shared.errors import EngineError, HttpError, RequestError
from mlx_isolate_supervisor.relay.last_event import EndError, error_at_end
from tests.integration.relay.engine_side import END, chunk, event
from tests.integration.relay.rig import Rig, make_rig, run, soon

STOPPING = EngineError("The engine was stopped.", status=503, code="engine_stopping")
STALLED = EngineError("The client stopped reading.", status=504, code="client_stalled")
TOO_LONG = RequestError("The prompt is too long.", code="context_length_exceeded")


def openai_event(error: HttpError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


async def stream_ended_by(rig: Rig, last: bytes, *, in_one_piece: bool) -> None:
    client, side = await rig.open_stream()
    await side.send(event("a"))
    await client.read_chunk()
    if in_one_piece:
        await side.send(event("b") + chunk(last) + END)
    else:
        await side.send(chunk(last))
        assert await client.read_chunk() == last
        await side.send(END)
    await client.read_end()
    await soon(rig.recorder.all_ended.wait())


@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize(
    ("last", "outcome", "code"),
    [
        (openai_event(STOPPING), "failed", "engine_stopping"),
        (anthropic_event(STOPPING), "failed", "engine_stopping"),
        (openai_event(STALLED), "cancelled", "client_stalled"),
        (openai_event(TOO_LONG), "rejected", "context_length_exceeded"),
        (b"data: [DONE]\n\n", "answered", None),
    ],
)
def test_the_outcome_is_what_the_last_event_says(
    last: bytes, outcome: str, code: str | None, in_one_piece: bool
) -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            await stream_ended_by(rig, last, in_one_piece=in_one_piece)
            (ended,) = rig.recorder.ended_ones
            assert (ended.outcome, ended.code, ended.status) == (outcome, code, 200)
            assert await rig.slot.outcome() == outcome

    run(scenario())


@pytest.mark.parametrize(
    "last",
    [
        b'data: {"choices":[{"delta":{"content":"\\ndata: {\\"error\\":{}}"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"data: {\\"error\\": 1}"}}]}\n\n',
        b": keepalive\n\n",
        b"",
        b"5\r\nab\n\n\r\n",
    ],
)
def test_text_of_a_model_is_never_taken_for_an_error(last: bytes) -> None:
    assert error_at_end(last) is None
    assert error_at_end(chunk(last)) is None


def test_an_error_without_a_code_or_that_cannot_be_read_is_an_error_still() -> None:
    assert error_at_end(chunk(b'data: {"error":{"message":"x"}}\n\n')) == EndError()
    assert error_at_end(chunk(b'data: {"error":tru')) == EndError()
    assert error_at_end(chunk(b'event: error\ndata: {"code":"c","error":7}\n\n')) == EndError()


@pytest.mark.parametrize("code", [None, "", "x" * 65, 'a"b', "Überlauf", "7"])
def test_a_code_that_is_no_word_becomes_no_label(code: str | None) -> None:
    assert EndError(code=code).word == "engine_error"
    assert EndError(code="engine_stopping").word == "engine_stopping"
