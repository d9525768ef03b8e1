"""An engine's first moments."""

import os
import sys
from pathlib import Path

import pytest

from mlx_isolate_engine.ahead import import_model_libraries
from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.start import leave_removed_folder


def test_a_working_folder_that_was_removed_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leave_removed_folder()
    assert Path.cwd() == tmp_path
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    leave_removed_folder()
    assert os.getcwd() == "/"


def test_an_installation_without_mlx_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(ModelError, match=r"pip install 'mlx\[cpu\]'") as caught:
        import_model_libraries()
    assert caught.value.is_permanent
