"""A disk that does not answer stops nobody."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.disk_look import LOOK_S, look
from mlx_isolate_supervisor.models.model_files import model_fingerprint
from mlx_isolate_supervisor.models.projection import weights_bytes
from tests.waiting import wait_for

DEADLINE_S = 10.0


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    return ModelSpec(id=f"m-{tmp_path.name}", model=str(tmp_path))


@pytest.fixture
def back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every walk over a folder waits until this is set."""
    set_free = threading.Event()
    walk = os.walk

    def hanging(*given: Any) -> Any:
        set_free.wait(DEADLINE_S)
        return walk(*given)

    monkeypatch.setattr(os, "walk", hanging)
    yield set_free
    set_free.set()


def test_the_disk_is_waited_for_once(model: ModelSpec, back: threading.Event) -> None:
    for ask, unknown in ((model_fingerprint, ()), (weights_bytes, 0)):
        began = time.monotonic()
        assert ask(model) == unknown
        assert time.monotonic() - began < 10 * LOOK_S
        threads = threading.active_count()
        assert [ask(model) for _ in range(50)] == [unknown] * 50
        assert threading.active_count() == threads
    back.set()
    wait_for(lambda: weights_bytes(model) == 1000, DEADLINE_S, "the disk is back")
    wait_for(lambda: len(model_fingerprint(model)) == 2, DEADLINE_S, "the disk is back")


def test_a_model_that_moved_to_another_disk_is_seen_there(
    model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = ModelSpec(id=model.id, model=str(tmp_path / "moved"))
    Path(moved.model).mkdir()
    (tmp_path / "moved" / "model.safetensors").write_bytes(bytes(2000))
    set_free = threading.Event()
    walk = os.walk

    def hanging(root: Any) -> Any:
        if str(root) == model.model:
            set_free.wait(DEADLINE_S)
        return walk(root)

    monkeypatch.setattr(os, "walk", hanging)
    try:
        assert (weights_bytes(model), model_fingerprint(model)) == (0, ())
        assert weights_bytes(moved) == 2000
        assert len(model_fingerprint(moved)) == 2
    finally:
        set_free.set()


def test_what_goes_wrong_is_told_to_who_asked() -> None:
    def ask() -> int:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        look("a fault", ask, 0)


def test_no_thread_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "Thread", Refused)
    assert look("anything", lambda: 1, 0) == 0
