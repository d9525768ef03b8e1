"""Whatever KV state depends on changes the fingerprint, also when a file keeps its size and time."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx_lm
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlx_isolate_engine.cache import fingerprint as module
from mlx_isolate_engine.cache.build import identify
from mlx_isolate_engine.cache.fingerprint import Fingerprint
from mlx_isolate_shared.config import EngineSettings

WEIGHTS = {"w": np.arange(60_000, dtype=np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    save_file(WEIGHTS, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({"hidden_size": 4, "rope_theta": 1.0}))
    (place / "tokenizer.json").write_text("{}")
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a"}))
    (place / "README.md").write_text("prose")
    return place


def of(folder: Path, **settings: object) -> Fingerprint:
    return identify(EngineSettings(**settings), folder)  # type: ignore[arg-type]


def test_the_same_files_give_the_same_fingerprint(folder: Path) -> None:
    assert of(folder) == of(folder)
    before = of(folder)
    (folder / "README.md").write_text("other prose")
    assert of(folder) == before


def replace_in_place(folder: Path) -> None:
    """Other weights of the same size, with the old modification time put back."""
    path = folder / "model.safetensors"
    facts = path.stat()
    weights = load_file(path)
    weights["w"][50_001] += 1
    save_file(weights, path)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_size == facts.st_size
    assert path.stat().st_mtime_ns == facts.st_mtime_ns


def other_type(folder: Path) -> None:
    save_file({"w": WEIGHTS["w"].astype(np.float16)}, folder / "model.safetensors")


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights replaced in place": replace_in_place,
    "weights of another type": other_type,
    "another shard": lambda f: save_file(WEIGHTS, f / "model-2.safetensors"),
    "configuration": lambda f: (f / "config.json").write_text(json.dumps({"hidden_size": 4})),
    "model code": lambda f: (f / "modeling.py").write_text("x = 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_changes_the_fingerprint(folder: Path, name: str) -> None:
    before = of(folder)
    CHANGES[name](folder)
    after = of(folder)
    assert after.value != before.value
    assert after.tokenizer == before.tokenizer


TOKENIZER_CHANGES: dict[str, Callable[[Path], object]] = {
    "tokenizer": lambda f: (f / "tokenizer.json").write_text('{"a": 1}'),
    "template in the configuration": lambda f: (f / "tokenizer_config.json").write_text("{}"),
    "template file": lambda f: (f / "chat_template.jinja").write_text("x"),
}


@pytest.mark.parametrize("name", TOKENIZER_CHANGES)
def test_a_change_of_the_tokenizer_changes_both(folder: Path, name: str) -> None:
    before = of(folder)
    TOKENIZER_CHANGES[name](folder)
    after = of(folder)
    assert after.value != before.value
    assert after.tokenizer != before.tokenizer


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_bits": 8},
        {"kv_bits": 8, "kv_group_size": 32},
        {"kv_bits": 8, "quantized_kv_start": 0},
        {"chat_template": "b"},
        {"draft_model": "owner/draft"},
    ],
    ids=str,
)
def test_a_setting_that_shapes_kv_state_changes_the_fingerprint(
    folder: Path, settings: dict[str, object]
) -> None:
    assert of(folder, **settings).value != of(folder).value


def test_an_adapter_replaced_in_place_changes_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(folder, adapter)
    before = of(folder, adapter_path=str(adapter))
    replace_in_place(adapter)
    assert of(folder, adapter_path=str(adapter)).value != before.value


def test_settings_that_do_not_shape_kv_state_keep_it(folder: Path) -> None:
    assert of(folder, max_tokens=7, decode_concurrency=3) == of(folder)


def test_mlx_lms_minor_counts_and_its_patch_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_lm, "__version__", "0.32.2")
    before = of(folder)
    monkeypatch.setattr(mlx_lm, "__version__", "0.32.9")
    assert of(folder) == before
    monkeypatch.setattr(mlx_lm, "__version__", "0.33.0")
    assert of(folder).value != before.value


def test_the_layout_version_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(folder)
    monkeypatch.setattr(module, "LAYOUT_VERSION", 999)
    assert of(folder).value != before.value
