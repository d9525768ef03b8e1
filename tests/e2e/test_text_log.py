"""Prompts and answers in the log of a real engine: never, unless a flag asks, and then with a warning."""

import json
from pathlib import Path

from tests.running_daemon import REAL, RunningDaemon
from tests.waiting import wait_for

WORDS = "a canary\nsings: \u202e\x1b[31m höre"


def ask(daemon: RunningDaemon) -> str:
    message = [{"role": "user", "content": WORDS}]
    answer = daemon.chat(messages=message, temperature=0, max_tokens=12)
    assert answer.status == 200, answer.body
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def logged(daemon: RunningDaemon) -> list[str]:
    return daemon.ask("GET", "/logs").body.decode().splitlines()


def text_of(lines: list[str], kind: str) -> str:
    """What was logged of one kind, put together again."""
    found = [line.partition(f" text.{kind} request=")[2] for line in lines]
    return "".join(json.loads(rest.partition(" ")[2]) for rest in found if rest)


def test_prompts_and_answers_are_logged_where_a_flag_asks(
    sliding_model: Path, tmp_path: Path
) -> None:
    with RunningDaemon(tmp_path, str(sliding_model), "--log-text", program=REAL) as daemon:
        daemon.wait_state("ready", deadline_s=120)
        answer = ask(daemon)
        wait_for(lambda: any(" text.answer " in line for line in logged(daemon)), 10)
        lines = logged(daemon)
        assert json.loads(text_of(lines, "prompt"))["messages"][0]["content"] == WORDS
        assert text_of(lines, "answer") == answer
        (warning,) = [line for line in lines if "settings.doubted" in line]
        assert " WARNING " in warning and "--log-text is on for " in warning
        assert "--log-text is on for " in daemon.stderr + daemon.stdout


def test_without_the_flag_no_line_holds_them(sliding_model: Path, tmp_path: Path) -> None:
    flags = ("--log-level", "DEBUG")
    with RunningDaemon(tmp_path, str(sliding_model), *flags, program=REAL) as daemon:
        daemon.wait_state("ready", deadline_s=120)
        answer = ask(daemon)
        lines = "\n".join(logged(daemon))
        assert " request.ended " in lines
        assert "canary" not in lines and json.dumps(answer)[1:-1] not in lines
        assert "canary" not in daemon.stderr + daemon.stdout
