"""The charts' hour: bounded, incremental, encoded once."""

import json

from mlx_isolate_supervisor.telemetry.history import (
    FIELDS,
    MODELS_MAX,
    SAMPLES_MAX,
    History,
    Sample,
)

NOW = 1000.0


def sample(time: float) -> Sample:
    return Sample(time, "ready", 1.5, 0.0, None, 10, 0, 1, 0)


def test_samples_come_back_by_field_name() -> None:
    history = History()
    history.add("m", sample(5.0))
    answer = json.loads(history.encode(0.0, NOW))
    row = dict(zip(answer["fields"], answer["models"]["m"][0], strict=True))
    assert row["time"] == 5.0
    assert row["tokens_per_s"] == 1.5
    assert row["ttft_s"] is None
    assert tuple(answer["fields"]) == FIELDS


def test_since_leaves_out_what_is_known() -> None:
    history = History()
    for time in range(5):
        history.add("m", sample(float(time)))
    rows = json.loads(history.encode(2.0, NOW))["models"]["m"]
    assert [row[0] for row in rows] == [3.0, 4.0]


def test_an_hour_is_kept_and_no_more() -> None:
    history = History()
    for time in range(SAMPLES_MAX + 10):
        history.add("m", sample(float(time)))
    rows = json.loads(history.encode(0.0, NOW))["models"]["m"]
    assert len(rows) == SAMPLES_MAX
    assert rows[0][0] == 10.0


def test_models_are_bounded_and_forgotten_when_not_served() -> None:
    history = History()
    for number in range(MODELS_MAX + 5):
        history.add(f"m{number}", sample(1.0))
    assert len(json.loads(history.encode(0.0, NOW))["models"]) == MODELS_MAX
    history.retain({"m10"})
    assert list(json.loads(history.encode(0.0, NOW))["models"]) == ["m10"]


def test_empty_history_is_valid_json() -> None:
    assert json.loads(History().encode(0.0, NOW))["models"] == {}


def test_the_servers_time_is_told_along() -> None:
    assert json.loads(History().encode(0.0, NOW))["now"] == NOW


def test_a_clock_that_was_set_back_stops_no_chart() -> None:
    history = History()
    for time in (5000.0, 5005.0, 1400.0, 1405.0):
        history.add("m", sample(time))
    rows = json.loads(history.encode(1400.0, 1406.0))["models"]["m"]
    assert [row[0] for row in rows] == [1405.0]
