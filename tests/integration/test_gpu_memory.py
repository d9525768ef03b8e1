"""What engines say of their GPU becomes part of the memory budget, in this run and in later ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pool_rig import pool_rig, run
from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for, wait_until

GB = 1_000_000_000
CUDA = {"backend": "cuda", "device_mb": 10_000, "mlx_mb": 4_000}


def config(tmp_path: Path, models: dict[str, dict[str, Any]]) -> Path:
    """A configuration of fake models, each with its faults and so many bytes of weights."""
    served: dict[str, Any] = {}
    for id, faults in models.items():
        size = faults.pop("weights", 0)
        folder = fake_model(tmp_path / id, **faults)
        with (folder / "model.safetensors").open("wb") as weights:
            weights.truncate(size)
        served[id] = {"path": str(folder)}
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"models": served, "prompt_cache_bytes": 0}))
    return file


def test_engines_on_one_gpu_keep_to_its_memory_though_the_machine_has_plenty(
    tmp_path: Path,
) -> None:
    file = config(tmp_path, {"a": {**CUDA}, "b": {**CUDA}, "huge": {"weights": 9 * GB}})
    flags = ("--config", str(file), "--memory-budget-gb", "1000")
    with RunningDaemon(tmp_path / "home", *flags) as daemon:
        assert daemon.status()["supervisor"]["gpus"] == []
        assert daemon.chat("a").status == 200
        [gpu] = daemon.status()["supervisor"]["gpus"]
        assert gpu["name"] == "" and gpu["budget_bytes"] == 9 * GB
        wait_for(lambda: daemon.status()["models"][0]["gpu_bytes"], 10, "a measurement")
        assert daemon.status()["models"][0]["gpu_bytes"] == 4 * GB
        # Nothing is known of it yet: it is taken for a process, and fits.
        assert daemon.chat("b").status == 200
        wait_for(lambda: daemon.status()["models"][1]["gpu_bytes"], 10, "a measurement")
        assert [model["state"] for model in daemon.status()["models"][:2]] == ["ready", "ready"]
        refused = daemon.chat("huge")
        assert refused.status == 507
        message = refused.json()["error"]["message"]
        assert "needs about 12 GB of GPU memory" in message
        assert "budget of all models is 9.0 GB; held by a (4.0 GB), b (4.0 GB)" in message
        assert "  GPU: 8.0 GB of 9.0 GB reserved" in daemon.command("status").stdout
    # The next daemon knows the GPU and what the engines held on it.
    with RunningDaemon(tmp_path / "home", *flags) as daemon:
        assert daemon.chat("huge").status == 507
        assert daemon.chat("a").status == 200
        assert daemon.status()["models"][0]["claimed_gpu_bytes"] == 5_200_000_000
        assert daemon.chat("b").status == 200
        assert daemon.status()["models"][0]["state"] == "stopped", "both would hold 10.4 GB"


def test_the_default_budget_follows_what_the_gpu_may_use_of_the_memory(tmp_path: Path) -> None:
    file = config(tmp_path, {"a": {"backend": "metal", "device_mb": 1_000}})
    with RunningDaemon(tmp_path / "home", "--config", str(file)) as daemon:
        before = daemon.status()["supervisor"]["memory_budget_bytes"]
        assert daemon.chat("a").status == 200
        after = daemon.status()["supervisor"]["memory_budget_bytes"]
        assert after == 750_000_000 < before
    with RunningDaemon(tmp_path / "home", "--config", str(file)) as daemon:
        assert daemon.status()["supervisor"]["memory_budget_bytes"] == 750_000_000


@pytest.mark.parametrize(("free_mb", "is_beside"), [(6_000, True), (4_000, False)])
def test_a_reload_on_a_gpu_overlaps_where_its_own_memory_suffices(
    free_mb: int, is_beside: bool
) -> None:
    async def main() -> None:
        async with pool_rig({"m": {**CUDA, "device_free_mb": free_mb}}) as rig:
            await rig.complete()
            await wait_until(lambda: rig.status().gpu_bytes, 10, "a measurement")
            await rig.pool.reload("m")
            await rig.complete()
            assert ("draining" in rig.moves()) is not is_beside

    run(main())
