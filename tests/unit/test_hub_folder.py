"""Where a hub model's files lie, to the supervisor as to the library that puts them there."""

import importlib.util
import runpy
from pathlib import Path

import pytest

from mlx_isolate_supervisor.models.model_files import hub_folder

VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="default"),
        {"HF_HOME": "/hf"},
        {"HF_HUB_CACHE": "/hub", "HF_HOME": "/hf"},
        {"HUGGINGFACE_HUB_CACHE": "/older"},
        {"XDG_CACHE_HOME": "/cache"},
        {"XDG_CACHE_HOME": "/cache", "HF_HOME": "/hf"},
        {"HF_HOME": "~/hf"},
        {"HF_HUB_CACHE": "$HOME/hub"},
    ],
    ids=lambda given: ", ".join(given),
)
def test_it_is_where_the_hubs_library_has_it(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    library = importlib.util.find_spec("huggingface_hub")
    assert library is not None and library.origin is not None
    constants = runpy.run_path(str(Path(library.origin).with_name("constants.py")))
    assert hub_folder("a/b") == Path(constants["HF_HUB_CACHE"]) / "models--a--b"
