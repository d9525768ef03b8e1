"""How long an idle model stays: by its own time, the daemon's, or a request's."""

import math

import pytest

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.idle import asked_idle_s, idle_limit_s


@pytest.mark.parametrize(
    ("own", "daemon", "asked", "limit"),
    [
        (None, 0.0, None, None),
        (None, 60.0, None, 60.0),
        (5.0, 60.0, None, 5.0),
        (0.0, 60.0, None, None),
        (5.0, 60.0, 7.0, 7.0),
        (5.0, 60.0, 0.0, 0.0),
        (5.0, 60.0, math.inf, None),
    ],
)
def test_the_limit(
    own: float | None, daemon: float, asked: float | None, limit: float | None
) -> None:
    assert idle_limit_s(ModelSpec(id="m", model="/m", ttl_s=own), daemon, asked) == limit


def test_a_pinned_model_has_none() -> None:
    spec = ModelSpec(id="m", model="/m", pinned=True, ttl_s=5.0)
    assert idle_limit_s(spec, 60.0, 0.0) is None


@pytest.mark.parametrize(
    ("keep_alive", "ttl", "asked"),
    [
        (None, None, None),
        ("5m", None, 300.0),
        ("90", None, 90.0),
        ("-1", None, math.inf),
        ("-1m", None, math.inf),
        (-1, None, math.inf),
        (0, None, 0.0),
        ("0", 60.0, 0.0),
        (None, 60.0, 60.0),
        (None, -1.0, math.inf),
    ],
)
def test_what_a_request_asks_for(
    keep_alive: str | float | None, ttl: float | None, asked: float | None
) -> None:
    assert asked_idle_s(keep_alive, ttl) == asked


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a time"):
        asked_idle_s("soon", None)
