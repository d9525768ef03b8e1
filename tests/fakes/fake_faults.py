"""What a fake engine can be told to do wrong: at its start, and in one request.

Start faults come from `fake.json` in the model folder, else from the environment variable
FAKE_ENGINE (JSON); request faults from the field `fake` of a request body. Both are Structs, so
that a test with a misspelt fault fails loudly.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec

Lie = Literal["garbage", "overlong", "flood", "double_ready", "unknown_tag"]


class StartFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of a start; they hold for incarnations up to `until_incarnation` only (0 = all).

    Attributes:
        load_s: time the load takes, told in ten loading lines unless `silent`.
        hang_load: load for ever.
        download_s: a stage `download` of this length before the load.
        die: how to end at the end of the load: `exit:3`, `exit:78`, `SIGKILL`, ...
        failed: code and message of a `failed` report line before dying.
        die_after_ready_s: end by `die` this long after ready, instead of during the load.
        say: lines for stderr at the start.
        say_many: so many numbered lines for stderr as well.
        ignore_term: refuse SIGTERM.
        ignore_lifeline: outlive the supervisor (no parent-death signal either).
        term_s: time a SIGTERM takes to end the process.
        close_report: close the report pipe instead of becoming ready.
        no_socket: report ready without a socket.
        lies: what to write to the report pipe besides the truth.
        report_before, report_after: files whose bytes are written to the report pipe before it is
            ready, and after.
        memory_mb: touch so much memory, page by page, which the kernel must drop at the end.
        fork_helper: leave a child process of our own running (a launcher's habit).
        backend, device_mb: what it computes on, and the memory of that.
        mlx_mb, device_free_mb: what it says that MLX holds, and what is free of a GPU.
    """

    until_incarnation: int = 0
    load_s: float = 0.0
    silent: bool = False
    hang_load: bool = False
    download_s: float = 0.0
    die: str | None = None
    failed: tuple[str, str] | None = None
    die_after_ready_s: float | None = None
    say: tuple[str, ...] = ()
    say_many: int = 0
    ignore_term: bool = False
    ignore_lifeline: bool = False
    term_s: float = 0.0
    close_report: bool = False
    no_socket: bool = False
    lies: tuple[Lie, ...] = ()
    report_before: str | None = None
    report_after: str | None = None
    memory_mb: int = 0
    fork_helper: bool = False
    backend: str = "none"
    device_mb: int = 0
    mlx_mb: int = 0
    device_free_mb: int = 0


class StandbyFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of a standby while it prepares.

    Attributes:
        die: how to end at the end of it: `exit:3`, `SIGKILL`, ...
        only_for_models: die only when it is told to prepare for a model.
        prepare_s: time that it takes.
    """

    die: str | None = None
    only_for_models: bool = False
    prepare_s: float = 0.0


class RequestFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults and shape of one answer.

    Attributes:
        chunks: events (stream) or words (not stream) of the answer; None: max_tokens, else 5.
        chunk_bytes: bytes of text in each event.
        interval_s: time between events.
        prefill_s: time without a byte before the headers; counters move unless `freeze`.
        prefill_still: counters stand still during the prefill.
        keepalive_s: comments at this interval during the prefill, after the headers.
        status: answer with this error status at once.
        die: how to end (`SIGKILL`, `exit:1`, ...), after `after` events (None: before headers).
        after: events before `die`, `hang`, `freeze`, `close` or `partial` takes place.
        hang: stop producing for ever; progress lines go on, counters stand still.
        freeze: block the whole process for ever, report lines too.
        close: close the connection without a terminator, and live on.
        partial: write the first half of the next chunk before `die` or `close`.
        error_event: send a `data: {"error": ...}` event and end.
        echo: answer with the request line, headers and body as JSON.
        content_length: with echo: False answers with chunked coding.
        hang_up: afterwards close the connection, which looks kept: `idle` = at once, `next` = when
            another request has come, which is not read.
        raw_headers: further response headers.
    """

    chunks: int | None = None
    chunk_bytes: int = 4
    interval_s: float = 0.0
    prefill_s: float = 0.0
    prefill_still: bool = False
    keepalive_s: float = 0.0
    status: int | None = None
    die: str | None = None
    after: int | None = None
    hang: bool = False
    freeze: bool = False
    close: bool = False
    partial: bool = False
    error_event: bool = False
    echo: bool = False
    content_length: bool = True
    hang_up: Literal["idle", "next"] | None = None
    raw_headers: tuple[tuple[str, str], ...] = ()


def standby_faults() -> StandbyFaults:
    """The faults of a standby, from the environment variable FAKE_STANDBY (JSON)."""
    return msgspec.json.decode(os.environ.get("FAKE_STANDBY", "{}"), type=StandbyFaults)


def start_faults(model: str, incarnation: int) -> StartFaults:
    """The faults that hold for this incarnation of `model`."""
    file = Path(model) / "fake.json"
    text = file.read_text() if file.is_file() else os.environ.get("FAKE_ENGINE", "{}")
    faults = msgspec.json.decode(text, type=StartFaults)
    if faults.until_incarnation and incarnation > faults.until_incarnation:
        return StartFaults()
    return faults
