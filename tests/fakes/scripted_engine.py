"""The engine process as it is, around a runtime without a model.

Run as `python -P tests/fakes/scripted_engine.py --id M --incarnation N --spec-fd A --report-fd B
--lifeline-fd C`. The spec's `model` says what happens: `ok` serves endless text, `cannot` and
`fails` end the load, `leaves` would end the program, `hangs` never ends it, `holds` ends neither the load nor native code that
holds the interpreter lock. A chat whose first message is `hold` holds that lock while generating,
`prefill` never gets past its prompt, `die` ends generation for good, `short` ends by itself.
"""

import asyncio
import re
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mlx_isolate_engine.app import run
from mlx_isolate_engine.completion.events import CompletionSummary, ContentDelta, PrefillProgress
from mlx_isolate_engine.completion.request import ChatPrompt, CompletionRequest
from mlx_isolate_engine.completion.seam import CompletionService, PreparedCompletion, Sink
from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.runtime import LoadingReport, Runtime
from mlx_isolate_engine.start import begin
from mlx_isolate_shared.wire import Loading, ModelFacts, Prepare, Progress, Start
from tests.fakes.scripted_service import FACTS, summary

TOKEN_S = 0.005


def hold_the_lock() -> None:
    """Stay in native code that never lets go of the interpreter lock."""
    print("holding", file=sys.stderr, flush=True)
    re.match(r"(a+)+$", "a" * 100 + "b")


class EndlessCompletion:
    """Counts tokens until it is cancelled."""

    prompt_tokens = 7
    notices: tuple[str, ...] = ()

    def __init__(self, runtime: "ScriptedRuntime", word: str) -> None:
        self._runtime = runtime
        self._word = word

    async def execute(self, sink: Sink) -> CompletionSummary:
        runtime = self._runtime
        runtime.active += 1
        try:
            if self._word == "die":
                runtime.failure.set_result("the loop ended")
            if self._word == "prefill":
                await sink(PrefillProgress(done=1, total=7))
                await asyncio.Event().wait()
            while True:
                runtime.generated += 1
                await sink(ContentDelta(text="x"))
                if self._word == "hold":
                    hold_the_lock()
                if self._word == "short":
                    runtime.completed += 1
                    return summary()
                # The pace of the made-up model, not a wait for anything.
                await asyncio.sleep(TOKEN_S)
        except asyncio.CancelledError:
            runtime.cancelled += 1
            raise
        finally:
            runtime.active -= 1

    async def close(self) -> None:
        pass


class ScriptedRuntime:
    """Implements Runtime and CompletionService."""

    cache = None

    def __init__(self) -> None:
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.active = self.generated = self.completed = self.cancelled = 0

    @property
    def service(self) -> CompletionService:
        return self

    @property
    def facts(self) -> ModelFacts:
        return FACTS

    def progress(self) -> Progress:
        return Progress(
            generated_tokens=self.generated,
            active=self.active,
            completed=self.completed,
            cancelled=self.cancelled,
        )

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        assert isinstance(request.prompt, ChatPrompt)
        return EndlessCompletion(self, request.prompt.messages[0]["content"])

    async def count_tokens(self, request: CompletionRequest) -> int:
        return 7

    async def close(self) -> None:
        print("runtime closed", file=sys.stderr)


async def load_runtime(start: Start, loading: LoadingReport) -> Runtime:
    loading(Loading(stage="weights", fraction=0.5))
    if start.model == "cannot":
        raise ModelError("model_missing", "There is no such model.")
    if start.model == "fails":
        raise MemoryError("no memory")
    if start.model == "leaves":
        sys.exit("it needs another package")
    if start.model == "hangs":
        await asyncio.Event().wait()
    if start.model == "holds":
        threading.Thread(target=hold_the_lock).start()
        await asyncio.Event().wait()
    return ScriptedRuntime()


def prepare_model(prepare: Prepare) -> None:
    print(f"prepared {prepare.model}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    begin(sys.argv[1:], lambda given, stop: run(given, stop, load_runtime, prepare_model))
