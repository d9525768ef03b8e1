"""Models that cannot load are told of with the reason, and work once their files are there."""

import time
from functools import partial
from pathlib import Path

import pytest

from tests.material.models import FULL, build_model
from tests.running_daemon import REAL, RunningDaemon
from tests.waiting import wait_for

READY_S = 90.0
REFUSAL_S = 5.0


def is_served(daemon: RunningDaemon, model: str) -> bool:
    return daemon.chat(model, max_tokens=2).status == 200


@pytest.mark.case("16")
def test_a_model_without_its_files_is_told_and_works_once_they_are_there(
    full_model: Path, tmp_path: Path
) -> None:
    whole = build_model(tmp_path / "aside", FULL)
    halved = build_model(tmp_path / "halved", FULL)
    weights = halved / "model.safetensors"
    weights.rename(tmp_path / "weights")
    absent = tmp_path / "absent"
    config = tmp_path / "config.yaml"
    config.write_text(
        "models:\n"
        f"  good: {{path: {full_model}}}\n"
        f"  halved: {{path: {halved}}}\n"
        f"  absent: {{path: {absent}}}\n"
        "hooks: {on_startup: {preload: [good]}}\n"
    )
    with RunningDaemon(tmp_path / "home", "--config", str(config), program=REAL) as daemon:
        good = daemon.wait_state("ready", 0, READY_S)["pid"]
        lines = daemon.ask("GET", "/logs").body.decode().splitlines()
        (warning,) = [line for line in lines if "settings.doubted" in line]
        assert f"models.absent: there is no folder {absent}" in warning
        for model in ("halved", "absent"):
            answer = daemon.chat(model, max_tokens=2)
            error = answer.json()["error"]
            assert (answer.status, error["code"]) == (503, "model_failed")
            # The reason, without a path or a name of Python's.
            assert error["message"] and str(tmp_path) not in error["message"]
            assert "Error" not in error["message"] and "Traceback" not in error["message"]
            began = time.monotonic()
            assert daemon.chat(model, max_tokens=2).status == 503
            assert time.monotonic() - began < REFUSAL_S
            assert daemon.chat("good", max_tokens=2).status == 200
        (tmp_path / "weights").rename(weights)
        whole.rename(absent)
        for model in ("halved", "absent"):
            wait_for(partial(is_served, daemon, model), READY_S, f"{model} serves")
        assert daemon.status()["models"][0]["pid"] == good
