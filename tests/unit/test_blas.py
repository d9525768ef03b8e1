"""Which BLAS is preloaded."""

from pathlib import Path

import pytest

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.engines import blas
from mlx_isolate_supervisor.engines.blas import choose_blas


@pytest.fixture(autouse=True)
def bare_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Linux machine without a GPU and without any BLAS."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(blas, "GPU_DISTRIBUTIONS", ())
    monkeypatch.setattr(blas, "OPENBLAS_PATTERNS", (f"{tmp_path}/sys/*/libopenblas.so.0",))
    monkeypatch.delenv("LD_PRELOAD", raising=False)


def put(path: Path) -> str:
    path.parent.mkdir(parents=True)
    path.touch()
    return str(path)


def test_off_preloads_nothing() -> None:
    assert choose_blas("off").environment(None) == {}


def test_the_systems_openblas_comes_first(tmp_path: Path) -> None:
    system = put(tmp_path / "sys/arch/libopenblas.so.0")
    put(tmp_path / "venv/lib/libmkl_rt.so.2")
    choice = choose_blas("auto")
    assert choice.path == system and "OpenBLAS" in choice.reason
    assert choice.environment(None) == {"LD_PRELOAD": system}
    assert choice.environment("/a.so") == {"LD_PRELOAD": f"{system}:/a.so"}


def test_mkl_is_used_where_there_is_no_openblas(tmp_path: Path) -> None:
    mkl = put(tmp_path / "venv/lib/libmkl_rt.so.2")
    assert choose_blas("auto").path == mkl


def test_a_link_to_what_is_gone_is_no_library(tmp_path: Path) -> None:
    for name in ("sys/arch/libopenblas.so.0", "venv/lib/libmkl_rt.so.2"):
        link = tmp_path / name
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / "gone.so")
    assert choose_blas("auto").path is None


def test_without_any_the_reason_names_the_remedy() -> None:
    choice = choose_blas("auto")
    assert choice.path is None and "libopenblas0-pthread" in choice.reason


def test_a_preload_that_is_already_there_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(tmp_path / "sys/arch/libopenblas.so.0")
    monkeypatch.setenv("LD_PRELOAD", "/mine/libopenblas.so")
    assert choose_blas("auto").path is None


def test_a_gpu_engine_gets_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(tmp_path / "sys/arch/libopenblas.so.0")
    monkeypatch.setattr(blas, "GPU_DISTRIBUTIONS", ("msgspec",))
    assert choose_blas("auto").path is None


def test_a_named_library_must_be_there(tmp_path: Path) -> None:
    library = put(tmp_path / "lib/libmine.so")
    assert choose_blas(library).path == library
    with pytest.raises(ConfigError, match="is not a file"):
        choose_blas(str(tmp_path / "nope.so"))
    with pytest.raises(ConfigError, match="space or colon"):
        choose_blas(put(tmp_path / "a b/libmine.so"))


def test_macos_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert choose_blas("auto").path is None
