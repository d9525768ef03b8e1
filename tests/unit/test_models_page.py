"""Listings and probes made from snapshots."""

import pytest
from anthropic.pagination import SyncPage
from anthropic.types import ModelInfo

from mlx_isolate_supervisor.pages.models_page import health, model_list, readiness, running_list
from mlx_isolate_supervisor.telemetry.status import ModelStatus
from tests.fakes.statuses import model_status, ready_status

UP = ready_status(id="up")
LOADING = model_status(id="loading", state="starting", desired="up")
DOWN = model_status(id="down")
FAILED = model_status(id="failed", state="failed", desired="up")
BACKOFF = model_status(id="backoff", state="backoff", desired="up")


@pytest.mark.parametrize(
    ("models", "stopping", "code", "word"),
    [
        ((UP,), False, 200, "ok"),
        ((DOWN,), False, 200, "ok"),
        ((UP, LOADING), False, 200, "loading"),
        ((UP, BACKOFF), False, 200, "degraded"),
        ((UP, FAILED), False, 200, "degraded"),
        ((FAILED,), False, 503, "failed"),
        ((UP,), True, 503, "stopping"),
    ],
)
def test_health_says_whether_requests_can_be_served(
    models: tuple[ModelStatus, ...], stopping: bool, code: int, word: str
) -> None:
    answer = health(models, is_stopping=stopping)
    assert (answer[0], answer[1]["status"]) == (code, word)


@pytest.mark.parametrize(
    ("models", "stopping", "code", "waiting"),
    [
        ((UP, DOWN), False, 200, []),
        ((UP, LOADING, FAILED), False, 503, ["loading", "failed"]),
        ((UP,), True, 503, []),
    ],
)
def test_readiness_names_what_should_be_up_and_is_not(
    models: tuple[ModelStatus, ...], stopping: bool, code: int, waiting: list[str]
) -> None:
    answer = readiness(models, is_stopping=stopping)
    assert (answer[0], answer[1]["waiting_for"]) == (code, waiting)


def test_the_list_of_models_has_openais_shape_and_no_unlisted_ones() -> None:
    listing = model_list([UP, DOWN, FAILED], {"failed"}, created=5)
    assert listing["object"] == "list"
    first, second = listing["data"]
    assert (first["id"], first["object"], first["created"]) == ("up", "model", 5)
    assert (first["context_length"], first["status"]) == (32768, {"value": "ready"})
    assert "context_length" not in second


def test_the_list_of_models_is_a_page_of_the_anthropic_client_too() -> None:
    page = SyncPage[ModelInfo].model_validate(model_list([UP, DOWN], set(), created=5))
    assert [model.display_name for model in page.data] == ["up", "down"]
    assert page.data[0].created_at.timestamp() == 5
    assert (page.first_id, page.last_id, page.has_more) == ("up", "down", False)
    assert model_list([], set(), created=5)["last_id"] is None


def test_running_lists_only_models_with_an_engine() -> None:
    listing = running_list([UP, LOADING, DOWN, FAILED])
    assert [(model["model"], model["state"]) for model in listing["running"]] == [
        ("up", "ready"),
        ("loading", "starting"),
    ]
