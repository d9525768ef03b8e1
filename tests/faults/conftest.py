"""What several tests of the demo's conversion begin with."""

from pathlib import Path

import pytest

from mlx_isolate_engine.model import demo
from mlx_isolate_engine.model.demo_source import DemoSource
from tests.material.gguf_model import tiny_source, write_gguf


@pytest.fixture(scope="module")
def source_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def source(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> DemoSource:
    # The tiny source needs no package.
    monkeypatch.setattr(demo, "check_installed", lambda: None)
    return tiny_source(source_file)
