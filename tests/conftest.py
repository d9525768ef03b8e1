"""Fixtures that every test may use: models built once a session."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.material.models import FULL, PARROT, SLIDING, SLOW, ModelSpec, build_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelSpec], Path]:
    """Builds a model, or gives the folder in which this session has built it. Do not write there.

    A test that breaks a folder builds its own with `build_model(tmp_path / "m", spec)`.
    """
    home = tmp_path_factory.mktemp("models")
    built: dict[ModelSpec, Path] = {}

    def folder_of(spec: ModelSpec) -> Path:
        if spec not in built:
            digest = hashlib.sha256(repr(spec).encode()).hexdigest()[:8]
            built[spec] = build_model(home / f"{spec.kind}-{digest}", spec)
        return built[spec]

    return folder_of


@pytest.fixture(scope="session")
def full_model(model_folder: Callable[[ModelSpec], Path]) -> Path:
    """A llama of random weights: full attention, endless printable text."""
    return model_folder(FULL)


@pytest.fixture(scope="session")
def sliding_model(model_folder: Callable[[ModelSpec], Path]) -> Path:
    """A gemma3_text of random weights: window of 16 mixed with full attention."""
    return model_folder(SLIDING)


@pytest.fixture(scope="session")
def slow_model(model_folder: Callable[[ModelSpec], Path]) -> Path:
    """A llama whose tokens take some ms, for acts in the middle of a stream."""
    return model_folder(SLOW)


@pytest.fixture(scope="session")
def parrot_model(model_folder: Callable[[ModelSpec], Path]) -> Path:
    """The parrot with the plain template."""
    return model_folder(PARROT)
