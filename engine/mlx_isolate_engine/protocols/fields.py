"""Request fields that several protocols share: their types with ranges, and what null means.

The limits are OpenAI's where it states one. Checks that need the model (context, vocabulary) belong
to prepare.
"""

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mlx_isolate_engine.completion.request import (
    RESERVED_TEMPLATE_ARGUMENTS,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingRequest,
)
from mlx_isolate_engine.protocols.json_body import check_free_form
from mlx_isolate_shared.errors import RequestError

# Choices of one request; each is a completion of its own with its own KV cache.
CHOICES_MAX = 16
# Of a request with several prompts, each counted `n` times; langchain sends 20 prompts at once.
ALL_CHOICES_MAX = 64
# Stop strings of one request and their length; each is searched for at every token.
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 1024
TOP_LOGPROBS_MAX = 20
# No context is longer; keeps a hostile number of tokens from overflowing anything.
TOKENS_MAX = 2**31 - 1
# Those that have a field of their own, besides the ones that no request may set.
_OWN_TEMPLATE_ARGUMENTS = {"add_generation_prompt", "continue_final_message"}
_COUNT = Meta(ge=0, le=2**31 - 1)

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]
# -1 and 0 both mean: no limit.
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
# JSON has one kind of number: 1e9 is a whole one, and some clients write it so.
TokenCount = int | float
StopString = Annotated[str, Meta(min_length=1, max_length=STOP_STRING_CHARS_MAX)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=STOP_STRINGS_MAX)]
FreeForm = dict[str, Any]


class SamplingBody(Struct, frozen=True, kw_only=True):
    """The sampler fields of OpenAI's and mlx-lm's requests, as they lie flat in a body."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] | None = None
    # 0 and 1 both mean: none. mlx-lm's own default is 0.
    repetition_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    repetition_context_size: Annotated[int, _COUNT] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_context_size: Annotated[int, _COUNT] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_context_size: Annotated[int, _COUNT] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    def request(self) -> SamplingRequest:
        """What the execution seam takes. A seed of -1 means, as in llama.cpp, none."""
        return SamplingRequest(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            repetition_penalty=self.repetition_penalty,
            repetition_context_size=self.repetition_context_size,
            presence_penalty=self.presence_penalty,
            presence_context_size=self.presence_context_size,
            frequency_penalty=self.frequency_penalty,
            frequency_context_size=self.frequency_context_size,
            logit_bias=self.logit_bias or None,
            seed=None if self.seed == -1 else self.seed,
        )


class LaneBody(Struct, frozen=True, kw_only=True):
    """Fields that choose among what was configured: adapter and draft model, by name."""

    adapters: str | None = None
    draft_model: str | None = None
    num_draft_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None


class StreamOptions(Struct, frozen=True, kw_only=True):
    """OpenAI's stream_options."""

    include_usage: bool | None = None


class JsonSchemaBody(Struct, frozen=True, kw_only=True):
    """The `json_schema` member of a response format."""

    name: str | None = None
    schema: FreeForm | None = None
    strict: bool | None = None


class ResponseFormatBody(Struct, frozen=True, kw_only=True):
    """OpenAI's response_format."""

    type: str | None = None
    json_schema: JsonSchemaBody | None = None


def token_limit(value: TokenCount | None, param: str) -> int | None:
    """A number of tokens: at least 1, or -1 for no limit but the context; None if absent.

    Raises:
        RequestError: zero, another negative number, or a fraction.
    """
    if value is None:
        return None
    if not math.isfinite(value) or value != int(value):
        raise RequestError(f"Invalid value for '{param}': expected a whole number.", param=param)
    if value == -1:
        return -1
    if value < 1:
        raise RequestError(
            f"Invalid value for '{param}': expected at least 1, or -1 for no limit.", param=param
        )
    return min(int(value), TOKENS_MAX)


def stop_strings(stop: Stop | None) -> tuple[str, ...]:
    """The stop strings of a request, in order."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def seeded(sampling: SamplingRequest, index: int) -> SamplingRequest:
    """The sampling of choice `index`: choices of one seed differ, and differ reproducibly."""
    if index == 0 or sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % 2**63)


def same_prompt(
    request: CompletionRequest, sampling: SamplingRequest, choices: int, group: str
) -> tuple[CompletionRequest, ...]:
    """The completions of one prompt, which share its prefill, each with sampling of its own.

    Args:
        group: what no other prompt has.
    """
    if choices == 1:
        return (msgspec.structs.replace(request, sampling=sampling),)
    return tuple(
        msgspec.structs.replace(
            request, sampling=seeded(sampling, index), group=group, choices=choices
        )
        for index in range(choices)
    )


def response_format(body: ResponseFormatBody | None) -> ResponseFormat | None:
    """The format that the output must have, None for plain text.

    Raises:
        RequestError: an unknown type, or a schema that is missing or too deep.
    """
    if body is None or body.type == "text":
        return None
    if body.type == "json_object":
        return JsonObjectFormat()
    if body.type != "json_schema":
        raise RequestError(
            "Invalid value for 'response_format.type': expected 'text', 'json_object' or "
            "'json_schema'.",
            param="response_format.type",
        )
    param = "response_format.json_schema"
    if body.json_schema is None or body.json_schema.schema is None:
        raise RequestError(f"'{param}.schema' is required.", param=param)
    return schema_format(body.json_schema.schema, body.json_schema.strict, f"{param}.schema")


def schema_format(schema: FreeForm, strict: bool | None, param: str) -> JsonSchemaFormat:
    """A checked JSON schema as output format; strict unless the request says otherwise."""
    check_free_form(schema, param)
    return JsonSchemaFormat(schema=schema, strict=strict is not False, param=param)


def template_arguments(
    arguments: FreeForm | None, *, effort: str | None = None, verbosity: str | None = None
) -> FreeForm:
    """Keyword arguments for the chat template; effort and verbosity are two unless given there.

    Raises:
        RequestError: one that belongs to the template call itself, or nested too deeply.
    """
    plain = dict(arguments or {})
    check_free_form(plain, "chat_template_kwargs")
    for name in plain:
        if name in RESERVED_TEMPLATE_ARGUMENTS or name in _OWN_TEMPLATE_ARGUMENTS:
            raise RequestError(
                f"'chat_template_kwargs' may not set '{name}'.",
                param=f"chat_template_kwargs.{name}",
            )
    if effort is not None:
        plain.setdefault("reasoning_effort", effort)
    if verbosity is not None:
        plain.setdefault("verbosity", verbosity)
    return plain
