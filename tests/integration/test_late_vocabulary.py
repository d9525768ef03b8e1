"""Who needs the vocabulary of grammars waits for it, and nobody else does."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from llguidance import LLTokenizer

from mlx_isolate_engine.completion import service as module
from mlx_isolate_engine.completion.grammar_vocabulary import grammar_vocabulary
from mlx_isolate_engine.completion.late_vocabulary import LateVocabulary
from mlx_isolate_engine.completion.request import JsonObjectFormat
from mlx_isolate_engine.completion.service import PREPARE_THREADS, ModelCompletionService
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import CapacityError
from tests.integration.generation_rig import rig, run_async, text_request

CONSTRAINED = text_request("say", response_format=JsonObjectFormat(), max_tokens=4)


class Slow:
    """Makes a vocabulary when it is let."""

    def __init__(self, failures: int = 0) -> None:
        self.may_go_on = threading.Event()
        self.begun = 0
        self._failures = failures

    def __call__(self, tokenizer: Any, size: int) -> Any:
        self.begun += 1
        self.may_go_on.wait()
        if self.begun <= self._failures:
            raise MemoryError
        return grammar_vocabulary(tokenizer, size)


def test_a_vocabulary_that_takes_long_is_told_as_such_and_made_once(
    full_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    monkeypatch.setattr(module, "grammar_vocabulary", slow)

    async def test() -> None:
        async with rig(full_model) as subject:
            service = ModelCompletionService(
                subject.thread, EngineSettings(), prepare_deadline_s=0.2
            )
            waiting = [
                asyncio.create_task(service.prepare(CONSTRAINED))
                for _ in range(2 * PREPARE_THREADS)
            ]
            plain = await service.prepare(text_request("hello"))  # beside all of them
            await plain.close()
            for refused in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(refused, CapacityError)
                assert (refused.status, refused.code) == (503, "vocabulary_not_ready")
                assert "template" not in refused.message
                assert refused.retry_after_s
            slow.may_go_on.set()
            await (await subject.service.prepare(CONSTRAINED)).close()
            await (await service.prepare(CONSTRAINED)).close()
            assert service.places_taken == 0
            assert slow.begun == 2, "once for each service"
            await service.close()

    run_async(test())


def test_a_vocabulary_that_could_not_be_made_is_tried_again(
    full_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Slow(failures=1)
    failing.may_go_on.set()
    monkeypatch.setattr(module, "grammar_vocabulary", failing)

    async def test() -> None:
        async with rig(full_model) as subject:
            with pytest.raises(MemoryError):
                await subject.service.prepare(CONSTRAINED)
            assert (await subject.run(CONSTRAINED)).text

    run_async(test())


def test_a_thread_that_could_not_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = LateVocabulary(lambda: cast(LLTokenizer, "made"))

    async def test() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError):
                await vocabulary.wait(5.0)
        await vocabulary.wait(5.0)
        assert cast(str, vocabulary.result()) == "made"

    def refuse(thread: threading.Thread) -> None:
        """What the limit of processes or of memory does."""
        raise RuntimeError("can't start new thread")

    asyncio.run(test())
