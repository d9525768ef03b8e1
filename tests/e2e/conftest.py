"""One real daemon over real engines for a whole session of end-to-end tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.material.models import FULL, PARROT, SLIDING, SLOW, ModelSpec
from tests.running_daemon import REAL, RunningDaemon

READY_DEADLINE_S = 120.0
MODELS = {"full": FULL, "sliding": SLIDING, "parrot": PARROT, "slow": SLOW}


@pytest.fixture(scope="session")
def daemon(
    model_folder: Callable[[ModelSpec], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningDaemon]:
    """The daemon with the models of MODELS, all ready. Tests leave it as they found it."""
    arguments = [str(model_folder(spec)) for spec in MODELS.values()]
    for name in MODELS:
        arguments += ["--served-model-name", name]
    home = tmp_path_factory.mktemp("daemon")
    # With the standby that users get by default.
    with RunningDaemon(home, *arguments, program=REAL, standby=None) as running:
        for index in range(len(MODELS)):
            running.wait_state("ready", index, READY_DEADLINE_S)
        yield running
