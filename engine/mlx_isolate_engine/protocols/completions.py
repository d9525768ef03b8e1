"""OpenAI text completions."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct

from mlx_isolate_engine.completion.events import (
    ContentDelta,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
)
from mlx_isolate_engine.completion.request import (
    CompletionRequest,
    TextPrompt,
    TokensPrompt,
)
from mlx_isolate_engine.protocols import openai_shapes as shapes
from mlx_isolate_engine.protocols.contract import Call, Delta
from mlx_isolate_engine.protocols.fields import (
    ALL_CHOICES_MAX,
    TOP_LOGPROBS_MAX,
    Choices,
    LaneBody,
    ResponseFormatBody,
    SamplingBody,
    Stop,
    StreamOptions,
    TokenCount,
    response_format,
    same_prompt,
    stop_strings,
    token_limit,
)
from mlx_isolate_engine.protocols.json_body import decode_body
from mlx_isolate_engine.protocols.openai_stream import ChunkStream, WriteChunk, by_prompt
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.errors import RequestError

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class CompletionsBody(Struct, frozen=True, kw_only=True):
    """A text completions request, without its sampler fields."""

    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    max_tokens: TokenCount | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormatBody | None = None


def parse(body: bytes, call: Call) -> "TextRequest":
    """Parse a request body.

    Raises:
        RequestError: 400 naming the field.
    """
    text = decode_body(body, CompletionsBody)
    sampling = decode_body(body, SamplingBody).request()
    lane = decode_body(body, LaneBody)
    choices = text.n or 1
    prompts = _prompts(text.prompt)
    if len(prompts) * choices > ALL_CHOICES_MAX:
        raise RequestError(
            f"'prompt' times 'n' asks for more than {ALL_CHOICES_MAX} choices.", param="prompt"
        )
    _refuse_what_the_model_cannot(text, choices, prompts)
    request = CompletionRequest(
        request_id=call.request_id,
        prompt=prompts[0],
        max_tokens=token_limit(text.max_tokens, "max_tokens"),
        stop=stop_strings(text.stop),
        top_logprobs=text.logprobs,
        response_format=response_format(text.response_format),
        adapter=lane.adapters,
        draft_model=lane.draft_model,
        num_draft_tokens=lane.num_draft_tokens,
    )
    completions = tuple(
        completion
        for place, prompt in enumerate(prompts)
        for completion in same_prompt(
            msgspec.structs.replace(request, prompt=prompt),
            sampling,
            choices,
            f"{call.unique}-{place}",
        )
    )
    return TextRequest(call, completions, text, choices)


def _prompts(
    prompt: str | list[str | int | list[int]] | None,
) -> list[TextPrompt | TokensPrompt]:
    """The prompts of a request: one text, several, one list of token ids, or several."""
    if prompt is None or prompt in ("", []):
        raise RequestError("'prompt' is required and may not be empty.", param="prompt")
    if isinstance(prompt, str):
        return [TextPrompt(text=prompt)]
    # A prompt may be millions of token ids, while the streams of others wait for this.
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [TokensPrompt(tokens=tuple(cast(list[int], prompt)))]
    if kinds == {str} and all(prompt):
        return [TextPrompt(text=text) for text in cast(list[str], prompt)]
    if kinds == {list} and all(prompt):
        return [TokensPrompt(tokens=tuple(ids)) for ids in cast(list[list[int]], prompt)]
    raise RequestError(
        "Invalid value for 'prompt': expected text, a list of texts, token ids, or a list of "
        "lists of token ids, none of them empty.",
        param="prompt",
    )


def _refuse_what_the_model_cannot(
    text: CompletionsBody, choices: int, prompts: Sequence[TextPrompt | TokensPrompt]
) -> None:
    if text.suffix:
        raise RequestError("This model cannot complete before a 'suffix'.", param="suffix")
    if (text.best_of or choices) != choices:
        raise RequestError("'best_of' must equal 'n'.", param="best_of")
    if text.echo and text.logprobs is not None:
        raise RequestError("'echo' cannot be combined with 'logprobs'.", param="echo")
    if text.echo and isinstance(prompts[0], TokensPrompt):
        raise RequestError("'echo' needs a 'prompt' that is text.", param="echo")


class TextRequest:
    """A parsed text completions request with its two formatters."""

    def __init__(
        self,
        call: Call,
        completions: tuple[CompletionRequest, ...],
        body: CompletionsBody,
        choices: int,
    ) -> None:
        self.completions = completions
        self.stream = bool(body.stream)
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._choices = choices
        self._echoes = [_echo(request) if body.echo else "" for request in completions]
        self._head = shapes.head(
            f"cmpl-{call.unique}", "text_completion", call, completions[0].adapter
        )

    def streamer(self) -> ChunkStream:
        """A formatter for the streamed answer."""
        return ChunkStream(
            self._head,
            _TextPieces(self._echoes),
            choices=self._choices,
            include_usage=self._include_usage,
        )

    def body(self, transcripts: Sequence[Transcript]) -> bytes:
        """The whole answer as JSON."""
        summaries = [transcript.summary for transcript in transcripts]
        return msgspec.json.encode(
            {
                **self._head,
                "choices": [
                    {
                        "text": self._echoes[index] + transcript.reasoning + transcript.text,
                        "index": index,
                        "logprobs": self._logprobs(transcript.logprobs),
                        "finish_reason": transcript.summary.finish_reason,
                    }
                    for index, transcript in enumerate(transcripts)
                ],
                "usage": shapes.usage(by_prompt(summaries, self._choices)),
                "timings": summaries[0].timings,
            }
        )

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.completions[0].top_logprobs is None:
            return None
        return shapes.text_logprobs(tokens, 0)


def _echo(request: CompletionRequest) -> str:
    return request.prompt.text if isinstance(request.prompt, TextPrompt) else ""


class _TextPieces:
    """Text of completions; the prompt comes first where it is to be echoed."""

    def __init__(self, echoes: Sequence[str]) -> None:
        self._echoes = echoes
        self._offsets = [0] * len(echoes)

    def nothing(self, index: int) -> dict[str, Any]:
        return _text(index, "")

    def opening(self, chunk: WriteChunk) -> Iterable[bytes]:
        return [chunk(_text(index, text)) for index, text in enumerate(self._echoes) if text]

    def delta(self, index: int, delta: Delta, chunk: WriteChunk) -> Iterable[bytes]:
        match delta:
            case ContentDelta():
                logprobs = None
                if delta.logprobs:
                    logprobs = shapes.text_logprobs(delta.logprobs, self._offsets[index])
                    self._offsets[index] += sum(len(token.token) for token in delta.logprobs)
                return (chunk(_text(index, delta.text), logprobs),)
            case ReasoningDelta():
                # What looks like reasoning is text here.
                return (chunk(_text(index, delta.text)),)
            case ToolCallDelta():
                return ()


def _text(index: int, text: str) -> dict[str, Any]:
    return {"text": text, "index": index}
