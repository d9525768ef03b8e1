"""Requests drawn from the OpenAPI document that the engine serves: what it says is what happens."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core import NotSet

from tests.engine_process import REAL, EngineProcess
from tests.material.models import ModelSpec
from tests.raw_http import RawResponse, ask

FUZZED = ModelSpec(kind="full", context=128, template="tools")
REQUEST_S = 30.0
# Fixed, so that a run that fails can be run again; the other fuzz draws anew each time.
SEED = 20_261_129
# Requests of one operation: half of them as the document says, half of them not.
NORMAL = 20
SLOW = 1000

# Any: schemathesis' operations and cases, of which only a path and a body are used.
Case = Any


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[ModelSpec], Path]) -> Iterator[EngineProcess]:
    with EngineProcess(REAL) as process:
        process.start(str(model_folder(FUZZED)))
        process.wait_ready()
        yield process


def send(engine: EngineProcess, case: Case) -> RawResponse:
    body = case.body
    if isinstance(body, NotSet):
        body = None
    elif not isinstance(body, bytes):
        body = json.dumps(body).encode()
    request = ask(engine.socket_path, case.formatted_path, body, method=case.method)
    return asyncio.run(asyncio.wait_for(request, REQUEST_S))


def check(engine: EngineProcess, case: Case, documented: set[int]) -> None:
    answer = send(engine, case)
    assert answer.status < 500, (answer.status, answer.body, engine.log[-2000:])
    assert answer.status in documented, (case.method, case.formatted_path, answer.status)
    assert answer.ended
    if answer.status >= 400:
        assert answer.json["error"]["message"]
    assert engine.child.poll() is None


def fuzz_operation(engine: EngineProcess, operation: Any, examples: int) -> int:
    documented = {int(status) for status in operation.responses.status_codes}
    modes = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]
    sent = 0

    @seed(SEED)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(case=st.one_of(modes))
    def one(case: Case) -> None:
        nonlocal sent
        sent += 1
        check(engine, case, documented)

    one()
    return sent


def fuzz(engine: EngineProcess, examples: int) -> int:
    """How many requests were sent."""
    served = asyncio.run(ask(engine.socket_path, "/openapi.json", method="GET"))
    document: Any = schemathesis.openapi.from_dict(served.json)
    operations = [found.ok() for found in document.get_all_operations()]
    return sum(fuzz_operation(engine, operation, examples) for operation in operations)


def test_requests_of_the_document_are_answered_as_it_says(engine: EngineProcess) -> None:
    assert fuzz(engine, NORMAL) >= 5 * NORMAL


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_requests_of_the_document_are_answered_as_it_says(
    engine: EngineProcess,
) -> None:
    assert fuzz(engine, SLOW) >= 5 * SLOW
