"""Random requests at a real engine: no 5xx, no hang, the same process throughout."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.engine_process import REAL, EngineProcess
from tests.material.models import ModelSpec
from tests.material.request_bodies import SHAPES, bodies
from tests.raw_http import ask

# Short enough that a completion without a limit ends soon, and tools so that they are rendered.
FUZZED = ModelSpec(kind="full", context=128, template="tools")
# Longest time for one request; every one of them asks for at most 16 × 8 tokens.
REQUEST_S = 30.0


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[ModelSpec], Path]) -> Iterator[EngineProcess]:
    with EngineProcess(REAL) as process:
        process.start(str(model_folder(FUZZED)))
        process.wait_ready()
        yield process


def send(engine: EngineProcess, path: str, body: bytes) -> None:
    response = asyncio.run(asyncio.wait_for(ask(engine.socket_path, path, body), REQUEST_S))
    assert response.status < 500, (response.status, response.body, engine.log[-2000:])
    assert response.ended
    assert b'"internal_error"' not in response.body
    if response.status >= 400:
        assert response.json["error"]["message"]
    assert engine.child.poll() is None


def fuzz(engine: EngineProcess, examples: int) -> None:
    number = random.SystemRandom().randrange(2**32)
    print(f"seed {number}")

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(path=st.sampled_from(sorted(SHAPES)), data=st.data())
    def one(path: str, data: st.DataObject) -> None:
        send(engine, path, data.draw(bodies(path)))

    one()


def test_500_random_requests_leave_the_engine_as_it_was(engine: EngineProcess) -> None:
    fuzz(engine, 500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_10000_random_requests_leave_the_engine_as_it_was(engine: EngineProcess) -> None:
    fuzz(engine, 10_000)
