"""What the drills hold a daemon to: every promise with its bound, in this one place.

docs/behaviour.md shows the same table; a test compares the two.
"""

from typing import Literal

import msgspec

Unit = Literal["s", "MB", ""]


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """One promise.

    Attributes:
        name: as verdicts and the documentation call it.
        limit: most that may be measured, in `unit`; None where it is kept or not.
        text: what is promised, for a person.
    """

    name: str
    limit: float | None = None
    unit: Unit = ""
    text: str


def _within(name: str, limit: float, unit: Unit, text: str) -> Promise:
    return Promise(name=name, limit=limit, unit=unit, text=text)


def _that(name: str, text: str) -> Promise:
    return Promise(name=name, text=text)


_ALL = (
    # What a client is told.
    _within("told", 1.0, "s", "from the end of an engine until its last client has its outcome"),
    _within("hang_told", 5.0, "s", "the same for a hung engine, beyond --report-silence"),
    _that("honest_end", "a stream that lost its engine ends with an error, never as if complete"),
    _that("uncut", "no request fails and no stream is cut"),
    _that("served", "the next request is answered"),
    _within("refusal", 1.0, "s", "until a model that has failed answers 503, with its cause"),
    # Engines.
    _that("pid_changed", "another process took over"),
    _that("same_engine", "the engine went on in its own process"),
    _within(
        "respawn", 1.0, "s", "from a kill to ready, without the bare load and pauses, by a standby"
    ),
    _within(
        "respawn_median", 0.1, "s", "the median of that after kill −9, of at least five repetitions"
    ),
    _that("one_engine", "simultaneous first requests start one engine"),
    _that("spawns", "five deaths in a row end the respawns until a pause or a reset"),
    _that("one_at_a_time", "with --models-max 1 no two models have an engine that serves"),
    # The supervisor.
    _within("supervisor_answer", 1.0, "s", "the slowest answer of /livez meanwhile"),
    _that("supervisor_stays", "the supervisor's pid does not change"),
    _within("supervisor_growth", 64, "MB", "what the supervisor grows by for a client that stalls"),
    # Clients.
    _within("cancel", 2.0, "s", "from a client's leaving until its engine has stopped working"),
    _within("neighbour", 10.0, "s", "a short request of another client while one stalls"),
    _that("resumed", "a client that reads again gets the rest, to the end"),
    # Ends.
    _within("engines_gone", 2.0, "s", "from a supervisor's kill until none of its children lives"),
    _within("restart", 10.0, "s", "until the next supervisor listens on the same port"),
    _within("stop", 60.0, "s", "an orderly stop, --shutdown-timeout"),
    _that("exit_status", "an orderly stop ends with status 0"),
    _that("nothing_left", "no child process and no socket is left"),
    # Disk.
    _that("disk_noticed", "writes that fail are counted"),
    _that("disk_resumes", "writes go on by themselves once there is room"),
)

PROMISES: dict[str, Promise] = {promise.name: promise for promise in _ALL}
# A median of fewer samples says little.
MEDIAN_SAMPLES_MIN = 5
# What a daemon runs with unless told otherwise; the hang drill waits for it.
REPORT_SILENCE_S = 10.0
