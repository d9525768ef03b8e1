"""Why an engine ended, in words that are fit for clients."""

import pytest

from mlx_isolate_supervisor.engines.child import Exit, describe_status
from mlx_isolate_supervisor.slots import causes
from mlx_isolate_supervisor.slots.lifecycle import Event
from mlx_isolate_supervisor.slots.restart import Judgement, RestartBudget
from mlx_isolate_supervisor.telemetry.status import LastExit


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/models/a/config.json is missing", "config.json is missing"),
        ("cannot read '/x/y z' here", "cannot read 'y z' here"),
        ("no path: 1/2 and and/or", "no path: 1/2 and and/or"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("the repo org/name is not there", "the repo org/name is not there"),
        ("~/models/m has no weights", "m has no weights"),
    ],
)
def test_paths_are_hidden_and_nothing_else(text: str, shown: str) -> None:
    assert causes.hide_paths(text) == shown


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ((), ""),
        (
            ("Traceback (most recent call last):", '  File "/a/b.py", line 1', "ValueError: no"),
            "no",
        ),
        (("mlx.core.SomeError: /x/y.bin is torn",), "y.bin is torn"),
        (("plain words", ""), "plain words"),
        (("KeyError",), ""),
        (("x" * 1000,), "x" * 200),
    ],
)
def test_last_words_hold_no_class_name_and_no_path(tail: tuple[str, ...], words: str) -> None:
    assert causes.last_words(tail) == words


def test_a_return_code_becomes_a_code_or_a_signal() -> None:
    assert describe_status(3) == Exit(code=3, signal=None)
    assert describe_status(-9) == Exit(code=None, signal="SIGKILL")
    assert describe_status(-250) == Exit(code=None, signal="signal 250")


def test_the_error_of_a_death_says_what_happened() -> None:
    killed = causes.died(Exit(code=None, signal="SIGKILL"), planned=False)
    assert "the engine was killed by SIGKILL while it worked on this request" in killed.message
    assert (killed.status, killed.headers()) == (502, {"Retry-After": "1"})
    cut = causes.cut(causes.shutting_down())
    assert (cut.status, cut.code, cut.is_planned) == (503, "shutting_down", True)
    hung = causes.hung("it reported nothing for 10 s")
    assert (hung.status, hung.code) == (504, "engine_hung")


@pytest.mark.parametrize(
    ("last_line", "end"),
    [
        ("OSError: torn", "of the last one: no hub (its last words: torn)"),
        ("ERROR engine.load_failed reason=no hub", "of the last one: no hub"),
    ],
)
def test_last_words_that_only_repeat_the_reason_are_left_out(last_line: str, end: str) -> None:
    last = LastExit(
        incarnation=5,
        code=1,
        signal=None,
        reason="no hub",
        cause="model_download",
        stderr_tail=(last_line,),
        at=0.0,
    )
    judgement = Judgement(event=Event.CIRCUIT_OPENED, budget=RestartBudget(streak=5))
    failure = causes.failure_of(judgement, last, None)
    assert failure is not None and failure.message.endswith(end)
