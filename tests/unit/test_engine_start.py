"""An engine's first moments."""

import os
from pathlib import Path

import pytest

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
