"""What ps, status, load and the start-up print."""

import io
import os
from typing import Literal

import msgspec
import pytest

from mlx_isolate_shared.wire import CacheFigures, Loading, Progress
from mlx_isolate_supervisor import subcommands
from mlx_isolate_supervisor.cli import main
from mlx_isolate_supervisor.commands.client import Daemon, daemon_of_settings
from mlx_isolate_supervisor.commands.control import outcome_line
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.commands.flush import flush_lines
from mlx_isolate_supervisor.commands.ps import ps_lines
from mlx_isolate_supervisor.commands.status import status_lines
from mlx_isolate_supervisor.commands.tables import paint_states, table
from mlx_isolate_supervisor.config import ModelSpec, ServeSettings
from mlx_isolate_supervisor.daemon import trouble_of
from mlx_isolate_supervisor.listening import bind, url_of, urls_of, wildcards_of
from mlx_isolate_supervisor.telemetry.display import (
    Display,
    describe_facts,
    describe_place,
    describe_ready,
    describe_start,
    draw_loading,
)
from mlx_isolate_supervisor.telemetry.status import Failure, LastExit, Status, Transition
from tests.fakes.statuses import FACTS, model_status, ready_status, status

KILLED = LastExit(
    incarnation=1,
    code=None,
    signal="SIGKILL",
    reason="killed by SIGKILL",
    cause="killed",
    stderr_tail=("one", "two"),
    at=1090.0,
)


def test_what_is_no_answer_of_a_daemon_is_told_in_a_sentence() -> None:
    for body in (b"hello", b"[]", b"\xff"):
        with pytest.raises(CommandError, match="what answers at h:1 is not mlx-isolate"):
            Daemon("h:1", None).decode(body, Status)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("starting", "did not start: no hub; another try follows"),
        ("ready", "lost its engine: no hub; a new one follows"),
    ],
)
def test_only_an_engine_that_served_is_called_lost(
    before: Literal["starting", "ready"], told: str
) -> None:
    moved = lost(before)
    assert trouble_of(moved) == told
    assert trouble_of(msgspec.structs.replace(moved, is_planned=True)) is None


def lost(before: Literal["starting", "ready"]) -> Transition:
    return Transition(
        model="m",
        incarnation=1,
        pid=None,
        before=before,
        event="lost",
        after="backoff",
        reason="no hub.",
        at=0.0,
    )


def test_a_character_that_the_terminal_lacks_is_shown_as_an_escape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))

    def show(_arguments: object, _engine: object) -> int:
        print("m\u00fc")
        return 0

    monkeypatch.setattr(subcommands, "run", show)
    main([])
    assert written.getvalue() == b"m\\xfc\n"


def test_ps_prints_one_line_a_model() -> None:
    document = status(
        ready_status(id="demo", active=2, queued=1, ttl_left_s=90.0),
        ready_status(id="kept", pinned=True),
        model_status(id="other/model", waits_for="for a"),
    )
    assert ps_lines(document, now=1065.0) == [
        "MODEL        STATE     PID  ENGINE  ACTIVE  QUEUED  MEMORY  RESTARTS  SINCE      STAYS",
        "demo         ready    4711      #1       2       1  1.2 GB         0  1m 5s ago  1m 30s",
        "kept         ready    4711      #1       0       0  1.2 GB         0  1m 5s ago  pinned",
        "other/model  stopped     -       -       0       0       -         0  1m 5s ago  waits for a",
    ]


def test_status_prints_what_a_person_asks_for() -> None:
    model = ready_status(
        id="demo",
        aliases=("d",),
        incarnation=2,
        active=1,
        restarts=1,
        restarts_by_cause={"killed": 1},
        last_exit=KILLED,
    )
    assert status_lines(status(model), "http://h:1", now=1100.0) == [
        "supervisor  http://h:1  pid 4700, version 0.1.0, up 1h 2m, 45 MB (pss)",
        "",
        "demo (also d)  ready for 1m 40s, wanted up",
        "  engine #2: pid 4711, 1.2 GB (pss)",
        "  gemma3_text, 268M parameters, float32, context 32768, cpu with OpenBLAS, loaded in 2.3s",
        "  requests: 1 running, 0 waiting",
        "  restarts: 1 (1 killed)",
        "  last exit: engine #1, SIGKILL, 10s ago: killed by SIGKILL",
        "    | one",
        "    | two",
    ]


def test_status_says_why_a_model_has_failed_and_what_comes_next() -> None:
    failure = Failure(cause="circuit_open", code="crash_loop", message="5 crashes", retry_in_s=12.0)
    lines = status_lines(status(model_status(state="failed", failure=failure)), "u", now=1000.0)
    assert "  failed (crash_loop): 5 crashes; next try in 12s" in lines
    told = Failure(cause="cannot_work", code="model_missing", message="There is no /m.")
    lines = status_lines(status(model_status(state="failed", failure=told)), "u", now=1000.0)
    assert "  failed (model_missing): There is no /m; no new try by itself" in lines


def test_status_and_flush_say_why_nothing_reaches_the_disk() -> None:
    figures = CacheFigures(ssd_enabled=True, ssd_trouble="/c cannot be written: do this")
    model = ready_status(progress=Progress(cache=figures))
    line = "  prompt cache on disk: /c cannot be written: do this"
    assert line in status_lines(status(model), "u", now=1000.0)
    evidence = {"durable": False, "entries": 1, "trouble": "/c cannot be written: do this"}
    assert flush_lines({"models": {"m": evidence, "n": {**evidence, "trouble": ""}}}) == [
        "m: not all durable (entries 1): /c cannot be written: do this",
        "n: not all durable (entries 1)",
    ]


def test_status_shows_how_far_a_load_is() -> None:
    loading = Loading(stage="download", fraction=0.25, detail="1 of 4 GB")
    lines = status_lines(status(model_status(state="starting", loading=loading)), "u", now=1000.0)
    assert "  loading: download 25% 1 of 4 GB" in lines


def test_the_outcome_of_a_load_is_one_line() -> None:
    failure = Failure(cause="cannot_work", code="model_missing", message="no config.json")
    assert outcome_line(model_status(state="failed", failure=failure)) == (
        "m: failed: no config.json"
    )
    assert outcome_line(model_status()) == "m: stopped"
    assert outcome_line(ready_status()).startswith("m: ready in 2.3s (gemma3_text")


def test_numbers_stand_to_the_right() -> None:
    assert table(("A", "N"), [("x", "1"), ("yy", "22")], {"N"}) == ["A    N", "x    1", "yy  22"]


def test_colours_come_only_where_wanted() -> None:
    line = "demo  failed  -"
    assert paint_states(line, False) == line
    assert paint_states(line, True) == "demo  \x1b[31mfailed\x1b[0m  -"


def test_the_first_lines_tell_which_models_wait_to_be_asked() -> None:
    models = [
        ModelSpec(id="demo", model="demo", preload=True),
        ModelSpec(id="big", model="/models/big"),
    ]
    assert describe_start("1.0", "http://h:1, http://i:1", "http://h:1", models).splitlines() == [
        f"mlx-isolate 1.0 on http://h:1, http://i:1 (pid {os.getpid()})",
        "  demo",
        "  big  /models/big  (loads on first use)",
        "  page: http://h:1/ui",
    ]


@pytest.mark.parametrize(
    ("host", "url", "more"),
    [
        ("127.0.0.1", "http://127.0.0.1:{}", ""),
        ("0.0.0.0", "http://127.0.0.1:{}", " and every other address of this machine (0.0.0.0)"),
    ],
)
def test_an_address_is_told_that_a_person_can_open(host: str, url: str, more: str) -> None:
    sockets = bind(host, 0)
    port = sockets[0].getsockname()[1]
    urls, wildcards = urls_of(sockets), wildcards_of(sockets)
    for listener in sockets:
        listener.close()
    assert urls == [url.format(port)]
    assert describe_place(urls, wildcards) == urls[0] + more


def test_an_address_of_ipv6_is_bracketed() -> None:
    hosts = {"::": "[::1]", "fd00::7": "[fd00::7]", "box.local": "box.local"}
    for host, shown in hosts.items():
        assert url_of(host, 9) == f"http://{shown}:9"


def test_the_daemon_of_a_wildcard_host_is_asked_in_its_own_family() -> None:
    hosts = {"0.0.0.0": "127.0.0.1", "::": "::1", "::1": "::1", "192.168.0.7": "192.168.0.7"}
    for host, asked in hosts.items():
        assert daemon_of_settings(ServeSettings(host=host, port=9)).host == asked


def test_the_ready_line_names_backend_and_blas() -> None:
    assert describe_ready("demo", 2.34, FACTS) == f"demo: ready in 2.3s ({describe_facts(FACTS)})"
    assert describe_facts(FACTS).endswith("cpu with OpenBLAS")


def test_the_bar_fits_the_terminal() -> None:
    loading = {"demo": Loading(stage="weights", fraction=0.5, detail="0.5 of 1.0 GB")}
    whole = draw_loading(loading, columns=200, plain=True)
    assert whole == f"demo: weights {'#' * 12}{'-' * 12}  50% 0.5 of 1.0 GB"
    assert draw_loading(loading, columns=20, plain=True) == whole[:19]
    assert "━" * 12 + "─" * 12 in draw_loading(loading, columns=200, plain=False)


def test_without_a_terminal_each_stage_is_one_plain_line() -> None:
    out = io.StringIO()
    display = Display(out, None)
    for step in ("import", "weights", "weights"):
        display.loading("demo", Loading(stage=step, fraction=0.1))
    display.loaded("demo")
    display.line("demo: ready")
    assert out.getvalue() == "demo: loading (import)\ndemo: loading (weights)\ndemo: ready\n"


def test_on_a_terminal_a_line_takes_the_place_of_the_bar() -> None:
    out = io.StringIO()
    display = Display(out, out)
    display.loading("demo", Loading(stage="weights", fraction=0.5))
    display.loaded("demo")
    display.line("demo: ready")
    drawn = out.getvalue()
    assert "\r\x1b[Kdemo: weights" in drawn
    assert drawn.endswith("\r\x1b[Kdemo: ready\n")
