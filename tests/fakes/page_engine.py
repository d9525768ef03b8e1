"""The engine process as it is, around a model that reads its lines from the last message.

Run as an engine is. The first word of the last user message chooses the script:

- `echo`: repeats all that the user has said, which shows that the conversation came along
- `count N`: counts to N, and goes on from where a continued answer stopped
- `think`: reasons, then answers
- `tool`: calls `get_weather`; the turn after the tool's result repeats that result
- `markup`: text full of Markdown and of HTML that must stay text
- `hostile`: links, HTML and control characters that would do something if they were obeyed
- `huge`: one token of a megabyte that is slow to take for Markdown
- `crash`: ends the process before the first token
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mlx_isolate_engine.app import run
from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallDelta,
)
from mlx_isolate_engine.completion.request import ChatPrompt, CompletionRequest
from mlx_isolate_engine.completion.seam import CompletionService, PreparedCompletion, Sink
from mlx_isolate_engine.runtime import LoadingReport, Runtime
from mlx_isolate_engine.start import begin
from mlx_isolate_shared.wire import CacheFigures, Loading, ModelFacts, Prepare, Progress, Start
from tests.fakes.scripted_service import FACTS, summary

# The pace of the made-up model.
TOKEN_S = 0.01
PROMPT_TOKENS = 7
MARKUP = """Here is a **bold** word, `code`, and a [link](https://example.invalid/).

1. first
2. second

```python
print("<b>not bold</b>")
```

<script>window.pwned = true</script> <img src=x onerror="window.pwned = true">
"""

HOSTILE = """[a](javascript:window.pwned=1) [b](data:text/html,<script>window.pwned=1</script>)
<javascript:window.pwned=1> ![x](https://evil.invalid/pixel.png) [c](https://evil.invalid/"onclick=1)
<iframe src="https://evil.invalid"></iframe><svg onload="window.pwned=1"><style>*{display:none}</style>
\x1b[31mred\x1b[0m \x07 \u202etxt.exe </div></article></body> {{constructor}}

```html"><img src=x onerror="window.pwned=1">
</code></pre><img src=x onerror="window.pwned=1">
```

| <img src=x onerror="window.pwned=1"> | b |
| --- | --- |
| <b>x</b> | y |
"""
# Runs of backticks of ever new lengths, none of which is closed.
HUGE = " ".join("`" * length for length in range(1, 1450))


def deltas(messages: tuple[dict[str, Any], ...], is_continued: bool) -> Iterator[Event]:
    """The answer to a conversation."""
    said = [str(message["content"]) for message in messages if message["role"] == "user"]
    script, _, rest = said[-1].partition(" ")
    if messages[-1]["role"] == "tool":
        yield from words(f"The tool said: {messages[-1]['content']}")
    elif script == "count":
        before = str(messages[-1]["content"]).split() if is_continued else []
        begin = int(before[-1]) + 1 if before else 1
        yield from words(" ".join(map(str, range(begin, int(rest) + 1))), lead=bool(before))
    elif script == "think":
        for word in ["Let", "me", "think", "about", "this", "."]:
            yield ReasoningDelta(text=word + " ")
        yield from words("Forty two.")
    elif script == "tool":
        yield ToolCallDelta(index=0, id="call_1", name="get_weather", arguments='{"city": ')
        yield ToolCallDelta(index=0, arguments='"Paris"}')
    elif script == "markup":
        yield from words(MARKUP)
    elif script == "hostile":
        yield from words(HOSTILE)
    elif script == "huge":
        yield ContentDelta(text=HUGE)
    elif script == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        yield from words("You said: " + " | ".join(said))


def words(text: str, *, lead: bool = False) -> Iterator[Event]:
    for number, word in enumerate(text.split(" ")):
        yield ContentDelta(text=word if number == 0 and not lead else " " + word)


class PageCompletion:
    """One scripted answer, at the pace of the made-up model."""

    prompt_tokens = PROMPT_TOKENS
    notices: tuple[str, ...] = ()

    def __init__(self, runtime: "PageRuntime", prompt: ChatPrompt) -> None:
        self._runtime = runtime
        self._prompt = prompt

    async def execute(self, sink: Sink) -> CompletionSummary:
        runtime = self._runtime
        runtime.active += 1
        runtime.prompt += PROMPT_TOKENS
        count = 0
        called = False
        try:
            continued = bool(self._prompt.template_kwargs.get("continue_final_message"))
            for event in deltas(self._prompt.messages, continued):
                called = called or isinstance(event, ToolCallDelta)
                await sink(event)
                count += 1
                runtime.generated += 1
                await asyncio.sleep(TOKEN_S)
        except asyncio.CancelledError:
            runtime.cancelled += 1
            raise
        finally:
            runtime.active -= 1
        runtime.completed += 1
        return summary("tool_calls" if called else "stop", completion=count)

    async def close(self) -> None:
        pass


class PageRuntime:
    """Implements Runtime and CompletionService."""

    cache = None

    def __init__(self) -> None:
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.active = self.prompt = self.generated = self.completed = self.cancelled = 0

    @property
    def service(self) -> CompletionService:
        return self

    @property
    def facts(self) -> ModelFacts:
        return FACTS

    def progress(self) -> Progress:
        return Progress(
            prompt_tokens=self.prompt,
            generated_tokens=self.generated,
            active=self.active,
            completed=self.completed,
            cancelled=self.cancelled,
            cache=CacheFigures(ram_entries=1, ram_bytes=1_000_000, ram_bytes_max=8_000_000),
        )

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        assert isinstance(request.prompt, ChatPrompt)
        return PageCompletion(self, request.prompt)

    async def count_tokens(self, request: CompletionRequest) -> int:
        return PROMPT_TOKENS

    async def close(self) -> None:
        pass


async def load_runtime(start: Start, loading: LoadingReport) -> Runtime:
    print(f"made-up model {start.model_id} loads", file=sys.stderr, flush=True)
    loading(Loading(stage="weights", fraction=0.5))
    return PageRuntime()


def prepare_model(prepare: Prepare) -> None:
    pass


if __name__ == "__main__":
    begin(sys.argv[1:], lambda given, stop: run(given, stop, load_runtime, prepare_model))
