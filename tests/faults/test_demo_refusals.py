"""Sources that the demo cannot be made from: each is one sentence, at once."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_isolate_engine.model.demo import ensure_demo
from mlx_isolate_engine.model.demo_source import DemoSource
from mlx_isolate_engine.model.errors import ModelError
from tests.material.gguf_model import SHAPE, quiet, tiny_source

pytest.importorskip("gguf", reason="the demo extra is not installed (pip install -e '.[demo]')")


def refused(tmp_path: Path, source: DemoSource) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ensure_demo(tmp_path, "float32", quiet, source)
    return caught.value


def test_another_source_is_refused(tmp_path: Path, source: DemoSource) -> None:
    error = refused(tmp_path, replace(source, sha256="0" * 64))
    assert error.code == "demo_broken"
    assert "tiny==1" in error.message


def test_damaged_package_is_refused(tmp_path: Path, source: DemoSource) -> None:
    def assemble(_: Path) -> None:
        raise ValueError("Assembled file sha256 did not match expected value")

    assert refused(tmp_path, replace(source, assemble=assemble)).code == "demo_broken"


@pytest.mark.parametrize("keep", [0, 3, 40, 5000, 200_000])
def test_source_that_is_no_gguf_file_is_refused(
    tmp_path: Path, source: DemoSource, source_file: Path, keep: int
) -> None:
    # With a checksum of its own, so that the reader sees the damage.
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(source_file.read_bytes()[:keep])
    assert refused(tmp_path / "cache", tiny_source(torn)).code == "demo_broken"


def test_a_source_whose_list_has_no_end_is_refused_at_once(
    tmp_path: Path, source: DemoSource, source_file: Path
) -> None:
    # A list of lists, of which there are said to be 2**63: the library would read on behind the end.
    content = source_file.read_bytes()
    name = b"tokenizer.ggml.scores"
    at = content.index(name) + len(name)
    lists = struct.pack("<IIQ", 9, 9, 2**63 - 1)
    bad = tmp_path / "endless.gguf"
    bad.write_bytes(content[:at] + lists + bytes(len(lists)))
    assert refused(tmp_path / "cache", tiny_source(bad)).code == "demo_broken"


def test_source_of_another_shape_is_refused(tmp_path: Path, source: DemoSource) -> None:
    other = replace(source, shape=replace(SHAPE, layers=15))
    error = refused(tmp_path, other)
    assert (error.code, "blk.14" in error.message) == ("demo_broken", True)


def test_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    def find_spec(_: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ModelError, match=r"pip install 'mlx-isolate\[demo\]'") as caught:
        ensure_demo(tmp_path, "float32", quiet)
    assert (caught.value.code, caught.value.is_permanent) == ("demo_missing", True)
    assert list(tmp_path.iterdir()) == []
