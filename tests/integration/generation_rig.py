"""The real generation thread and completion service on a tiny model, inside the test process."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx_lm
import msgspec

from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    ContentDelta,
    Event,
    PrefillProgress,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
)
from mlx_isolate_engine.completion.request import (
    ChatPrompt,
    CompletionRequest,
    SamplingRequest,
    TextPrompt,
    TokensPrompt,
)
from mlx_isolate_engine.completion.service import ModelCompletionService
from mlx_isolate_engine.generation.ports import LoadedModel, MakePromptCache
from mlx_isolate_engine.generation.thread import REST_AFTER_S, GenerationThread
from mlx_isolate_engine.model.adapters import AdapterRack
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.wire import ModelFacts
from tests.waiting import wait_until

T = TypeVar("T")

# No test of a tiny model takes so long; what hangs fails with a stack instead of the session.
TEST_DEADLINE_S = 120.0
IDLE_DEADLINE_S = 10.0


@dataclass(frozen=True)
class TinyLoaded:
    """A `LoadedModel` as mlx_lm itself loads it."""

    model: Any
    tokenizer: Any
    facts: ModelFacts


def load_tiny(folder: Path) -> TinyLoaded:
    """Load a folder of tests/material with mlx_lm alone."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    config = json.loads((folder / "config.json").read_text())
    facts = ModelFacts(
        architecture=config["model_type"],
        parameters=0,
        weights_bytes=0,
        dtype="float32",
        context_length=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        backend="cpu",
    )
    return TinyLoaded(model, tokenizer, facts)


@dataclass
class Answer:
    """What a sink has received."""

    events: list[Event] = field(default_factory=lambda: list[Event]())
    summary: CompletionSummary | None = None

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, ContentDelta))

    @property
    def reasoning(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, ReasoningDelta))

    @property
    def deltas(self) -> list[str]:
        return [e.text for e in self.events if isinstance(e, ContentDelta)]

    @property
    def calls(self) -> list[ToolCallDelta]:
        return [e for e in self.events if isinstance(e, ToolCallDelta)]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [p for e in self.events if isinstance(e, ContentDelta) for p in e.logprobs]

    @property
    def prefills(self) -> list[PrefillProgress]:
        return [e for e in self.events if isinstance(e, PrefillProgress)]

    @property
    def end(self) -> CompletionSummary:
        assert self.summary is not None, "it has not ended"
        return self.summary


class Rig:
    """A running thread and its service."""

    def __init__(
        self, thread: GenerationThread, service: ModelCompletionService, loaded: LoadedModel
    ) -> None:
        self.thread = thread
        self.service = service
        self.loaded = loaded

    async def run(
        self,
        request: CompletionRequest,
        watch: Callable[[Event], Awaitable[None]] | None = None,
    ) -> Answer:
        """Prepare and execute; `watch` sees every event first."""
        answer = Answer()
        prepared = await self.service.prepare(request)

        async def sink(event: Event) -> None:
            if watch is not None:
                await watch(event)
            answer.events.append(event)

        answer.summary = await prepared.execute(sink)
        return answer

    async def wait_idle(self) -> None:
        """Until every completion has left every place that counts one."""
        counters = self.thread.counters
        await wait_until(
            lambda: (
                (counters.active, counters.queued, counters.coming, self.service.places_taken)
                == (0, 0, 0, 0)
            ),
            IDLE_DEADLINE_S,
            "all counters at zero",
        )


def _load_adapters(folders: dict[str, str], loaded: LoadedModel) -> AdapterRack:
    return AdapterRack(loaded.model, folders)


@asynccontextmanager
async def rig(
    folder: Path,
    *,
    make_prompt_cache: MakePromptCache | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
    load: Callable[[Path], LoadedModel] = load_tiny,
    draft: Path | None = None,
    rest_after_s: float = REST_AFTER_S,
    **settings: Any,
) -> AsyncGenerator[Rig]:
    """A rig for the time of the block; at its end everything has stopped."""
    chosen = EngineSettings(**settings)
    options: dict[str, Any] = {} if on_failure is None else {"on_failure": on_failure}
    if draft is not None:
        chosen = msgspec.structs.replace(chosen, draft_model=str(draft))
        options["load_draft"] = lambda: load_tiny(draft)
    if chosen.adapters:
        options["load_adapters"] = partial(_load_adapters, chosen.adapters)
    thread = GenerationThread(
        chosen,
        lambda: load(folder),
        make_prompt_cache=make_prompt_cache,
        rest_after_s=rest_after_s,
        **options,
    )
    loaded = await thread.start()
    service = ModelCompletionService(thread, chosen)
    try:
        yield Rig(thread, service, loaded)
    finally:
        await service.close()
        await thread.stop()


def run_async(test: Coroutine[Any, Any, T], deadline_s: float = TEST_DEADLINE_S) -> T:
    """Run a test's coroutine on a fresh loop, bounded."""

    async def bounded() -> T:
        return await asyncio.wait_for(test, deadline_s)

    return asyncio.run(bounded())


def text_request(text: str, **fields: Any) -> CompletionRequest:
    """A text completion."""
    sampling = fields.pop("sampling", SamplingRequest())
    return CompletionRequest(
        request_id="test", prompt=TextPrompt(text=text), sampling=sampling, **fields
    )


def tokens_request(tokens: list[int], **fields: Any) -> CompletionRequest:
    """A completion of token ids."""
    return CompletionRequest(request_id="test", prompt=TokensPrompt(tokens=tuple(tokens)), **fields)


def chat_request(*contents: str, **fields: Any) -> CompletionRequest:
    """A chat whose messages alternate, beginning with the user."""
    messages = tuple(
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    )
    prompt = ChatPrompt(
        messages=fields.pop("messages", messages),
        tools=fields.pop("tools", ()),
        template_kwargs=fields.pop("template_kwargs", {}),
    )
    return CompletionRequest(request_id="test", prompt=prompt, **fields)
