"""Facts read from configurations and from the process's memory map."""

from pathlib import Path

import pytest

from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.model.facts import (
    CONTEXT_WITHOUT_LIMIT,
    context_length,
    loaded_blas,
    vocabulary_size,
)


def test_context_comes_from_the_configuration_first() -> None:
    assert context_length({"max_position_embeddings": 4096}, 1000) == 4096


def test_context_may_be_nested() -> None:
    assert context_length({"text_config": {"max_position_embeddings": 8192}}) == 8192


@pytest.mark.parametrize("value", [2**31, 2**63, 10**30])
def test_a_context_longer_than_mlx_counts_is_cut(value: int) -> None:
    assert context_length({"max_position_embeddings": value}) == 2**31 - 1


def test_context_falls_back_to_the_tokenizers_limit() -> None:
    assert context_length({"max_position_embeddings": None}, 2048) == 2048


@pytest.mark.parametrize("limit", [None, 10**30, 0, -1, "long"])
def test_context_without_any_limit_is_bounded(limit: object) -> None:
    assert context_length({}, limit) == CONTEXT_WITHOUT_LIMIT


@pytest.mark.parametrize("value", [True, "4096", 0, -5, 4096.0])
def test_nonsense_is_no_context_length(value: object) -> None:
    assert context_length({"max_position_embeddings": value}, 100) == 100


def test_vocabulary_is_the_number_of_logits() -> None:
    assert vocabulary_size({"vocab_size": 512}, 500) == 512
    assert vocabulary_size({"text_config": {"vocab_size": 600}}, 500) == 600
    assert vocabulary_size({}, 500) == 500


REFERENCE = "7f0-7f1 r-xp 0 fe:00 7 /venv/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0\n"
PRELOADED = "7f2-7f3 r-xp 0 fe:00 8 /usr/lib/openblas-pthread/libopenblasp-r0.3.21.so\n"
NUMPY = "7f4-7f5 r-xp 0 fe:00 9 /venv/numpy.libs/libscipy_openblas64_-1.so\n"


@pytest.mark.parametrize(
    ("maps", "name"),
    [
        (REFERENCE, "reference BLAS (libblas-bd8a282c.so.3.10.0)"),
        (REFERENCE + PRELOADED, "OpenBLAS (libopenblasp-r0.3.21.so)"),
        (REFERENCE + NUMPY, "reference BLAS (libblas-bd8a282c.so.3.10.0)"),
        (REFERENCE + "7-8 r-xp 0 fe:00 9 /opt/libmkl_rt.so.2\n", "MKL (libmkl_rt.so.2)"),
        ("7f4-7f5 rw-p 0 00:00 0 \n", None),
    ],
)
def test_the_blas_that_wins_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maps: str, name: str | None
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "maps").write_text(maps)
    assert loaded_blas(tmp_path / "maps") == name


@pytest.mark.parametrize("code", ["model_download", "disk_full", "out_of_memory"])
def test_passing_causes_are_not_permanent(code: str) -> None:
    assert not ModelError(code, "").is_permanent


@pytest.mark.parametrize("code", ["model_missing", "model_broken", "model_offline", "demo_missing"])
def test_causes_in_files_and_settings_are_permanent(code: str) -> None:
    assert ModelError(code, "").is_permanent
