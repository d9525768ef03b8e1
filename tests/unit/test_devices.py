"""GPUs: what an engine reads of them, what the supervisor keeps, and the limits that follow."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_isolate_engine import device
from mlx_isolate_shared.wire import ModelFacts
from mlx_isolate_supervisor.config import ModelSpec, ServeSettings
from mlx_isolate_supervisor.models.devices import Device, DeviceBook, gpu_of
from mlx_isolate_supervisor.models.pool_limits import PoolLimits, pool_limits, with_devices
from mlx_isolate_supervisor.models.room import GpuLimits
from tests.fakes.statuses import FACTS

GB = 1_000_000_000
DEFAULT = PoolLimits(budget_bytes=48 * GB, ceiling_bytes=64 * GB, is_default=True)


def facts(backend: str, memory_bytes: int) -> ModelFacts:
    return msgspec.structs.replace(FACTS, backend=backend, device_memory_bytes=memory_bytes)


# As MLX 0.32 describes its devices.
METAL: dict[str, Any] = {
    "architecture": "applegpu_g16s",
    "max_buffer_length": 28 * GB,
    "max_recommended_working_set_size": 51 * GB,
    "memory_size": 64 * GB,
}
CUDA: dict[str, Any] = {
    "device_name": "NVIDIA H200",
    "free_memory": 30 * GB,
    "total_memory": 150 * GB,
}


@pytest.mark.parametrize(
    ("backend", "info", "total", "free"),
    [
        ("metal", METAL, 51 * GB, 0),
        ("metal", {"memory_size": 64 * GB}, 64 * GB, 0),
        ("cuda", CUDA, 150 * GB, 30 * GB),
        ("cuda", {}, 0, 0),
        ("metal", {}, 0, 0),
    ],
)
def test_what_mlx_says_of_a_device(
    backend: str, info: dict[str, Any], total: int, free: int
) -> None:
    assert device.total_of(backend, info) == total
    assert device.free_of(info) == free


def test_what_a_process_may_still_take(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    monkeypatch.setattr(mx, "get_active_memory", lambda: 20 * GB)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 3 * GB)
    for backend, info, usable in (("metal", METAL, 31 * GB), ("cuda", CUDA, 33 * GB)):
        monkeypatch.setattr(mx, "device_info", partial(dict[str, Any], info))
        monkeypatch.setattr(device, "backend_name", partial(str, backend))
        assert device.usable_bytes() == usable
        assert device.own_free_bytes() == (30 * GB if backend == "cuda" else 0)
    monkeypatch.setattr(device, "backend_name", lambda: "cpu")
    assert device.usable_bytes() is None
    assert device.memory_bytes() == device.own_free_bytes() == 0


def test_a_device_outlives_the_daemon_and_is_written_only_when_it_is_news(tmp_path: Path) -> None:
    path = tmp_path / "state/devices.json"
    book = DeviceBook(path)
    assert book.note("", facts("metal", 51 * GB))
    written = path.stat().st_mtime_ns
    assert not book.note("", facts("metal", 51 * GB))
    assert path.stat().st_mtime_ns == written
    assert DeviceBook(path).known == {"": Device(backend="metal", memory_bytes=51 * GB)}


def test_a_device_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    DeviceBook(path).note("", facts("cuda", 80 * GB))
    assert DeviceBook(path).note("", facts("cpu", 0))
    assert DeviceBook(path).known == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version":2,"devices":{"":{"backend":"cuda","memory_bytes":80000000000}}}',
        '{"version":1,"devices":{"":{"backend":"cuda","memory_bytes":-1}}}',
        '{"version":1,"devices":{"":{"backend":"cuda","memory_bytes":5}}}',
        '{"version":1,"devices":{"":{"backend":"cuda","memory_bytes":1e40}}}',
        "[" * 5000,
    ],
)
def test_a_file_that_makes_no_sense_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "devices.json"
    path.write_text(text)
    assert DeviceBook(path).known == {}


def test_a_book_that_cannot_be_written_still_knows(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    book = DeviceBook(tmp_path / "file/devices.json")
    assert book.note("", facts("cuda", 80 * GB))
    assert book.known[""].has_own_memory


def test_the_gpu_is_the_first_that_a_models_environment_names() -> None:
    def gpu(value: str) -> str:
        return gpu_of(ModelSpec(id="m", model="m", env={"CUDA_VISIBLE_DEVICES": value}))

    assert gpu_of(ModelSpec(id="m", model="m")) == ""
    assert [gpu(value) for value in ("1", "2,3", " GPU-ab ", "")] == ["1", "2", "GPU-ab", ""]


def test_a_default_budget_is_a_share_of_what_the_gpu_may_use_of_the_memory() -> None:
    metal = {"": Device(backend="metal", memory_bytes=40 * GB)}
    found = with_devices(DEFAULT, metal)
    assert (found.budget_bytes, found.ceiling_bytes) == (30 * GB, 40 * GB)
    assert found.gpus == {}


def test_a_budget_that_was_asked_for_stays() -> None:
    asked = PoolLimits(budget_bytes=60 * GB, ceiling_bytes=60 * GB)
    metal = {"": Device(backend="metal", memory_bytes=40 * GB)}
    assert with_devices(asked, metal) == asked


def test_a_gpus_own_memory_is_limited_beside_the_machines() -> None:
    found = with_devices(DEFAULT, {"": Device(backend="cuda", memory_bytes=20 * GB)})
    assert (found.budget_bytes, found.ceiling_bytes) == (48 * GB, 64 * GB)
    assert found.gpus == {"": GpuLimits(budget_bytes=18 * GB, ceiling_bytes=20 * GB)}


def test_only_a_budget_that_nobody_asked_for_is_a_default() -> None:
    model = ModelSpec(id="m", model="m")
    assert pool_limits(ServeSettings(models=(model,))).is_default
    asked = pool_limits(ServeSettings(models=(model,), memory_budget_bytes=GB))
    assert not asked.is_default and asked.budget_bytes == GB
