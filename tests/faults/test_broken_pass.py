"""A pass of the model that fails leaves nothing behind that a later prompt could begin with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_shared.errors import EngineError
from tests.integration.generation_rig import TinyLoaded, load_tiny, rig, run_async, tokens_request
from tests.material.models import FULL, RECURRENT, ModelSpec
from tests.waiting import wait_until

Folder = Callable[[ModelSpec], Path]
STEP = 16


class BreaksAfter:
    """A model that fails in one of its passes, after all layers have written to their caches."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes_left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        result = self._model(*arguments, **options)
        if self.passes_left is not None:
            self.passes_left -= 1
            if self.passes_left < 0:
                raise RuntimeError("a kernel failed")
        return result


@pytest.mark.parametrize("passes", [0, 1, 5], ids=["first piece", "second piece", "decoding"])
@pytest.mark.parametrize("spec", [FULL, RECURRENT], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("rows", [1, 4], ids=["one lane", "batched"])
def test_a_pass_that_fails_leaves_no_state_behind(
    rows: int, spec: ModelSpec, passes: int, model_folder: Folder
) -> None:
    cache = PromptCache(entries_max=9, bytes_max=None)
    failures: list[BaseException] = []
    models: list[BreaksAfter] = []

    def load(folder: Path) -> TinyLoaded:
        loaded = load_tiny(folder)
        models.append(BreaksAfter(loaded.model))
        return TinyLoaded(models[0], loaded.tokenizer, loaded.facts)

    async def main() -> None:
        async with rig(
            model_folder(spec),
            make_prompt_cache=lambda _: cache,
            on_failure=failures.append,
            load=load,
            decode_concurrency=rows,
            prefill_step_size=STEP,
        ) as running:
            models[0].passes_left = passes
            with pytest.raises(EngineError):
                await running.run(tokens_request(list(range(40, 90)), max_tokens=30))
            await wait_until(lambda: failures, 20)

    run_async(main())
    assert [type(failure) for failure in failures] == [RuntimeError]
    # Checkpoints that were reached before stay: their state was whole.
    assert {entry["kind"] for entry in cache.entries()} <= {"prompt"}
