"""What a protocol hands to the execution seam: one typed request to generate.

A protocol has checked types and ranges and turned null into absent; what needs the model (context
length, vocabulary, template) is checked in prepare. None means: the engine's default applies.
"""

from typing import Any

import msgspec

# Keyword arguments of the renderer itself; a request that could set them would choose its own
# template or change the result's type.
RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "chat_template",
        "conversation",
        "documents",
        "load_audio_from_video",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sampling_rate",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages in the form chat templates take: each with a role and string (or null) content.

    Attributes:
        param: the field of the request that holds them, which a refusal names.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = {}
    param: str = "messages"


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Plain text, tokenized with the tokenizer's own special tokens."""

    text: str
    param: str = "prompt"


class TokensPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids as they are; prepare checks them against the vocabulary."""

    tokens: tuple[int, ...]
    param: str = "prompt"


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sampler and logits-processor fields of a request; None where the request is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float | None = None
    presence_context_size: int | None = None
    frequency_penalty: float | None = None
    frequency_context_size: int | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Any JSON object; `param` is the field of the request that asks for it."""

    param: str = "response_format"


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """JSON that validates against a schema.

    Attributes:
        strict: refuse a schema of which a part cannot be enforced; otherwise pass over that part.
        param: the field of the request that asks for it, which a refusal names.
    """

    schema: dict[str, Any]
    strict: bool = True
    param: str = "response_format"


ResponseFormat = JsonObjectFormat | JsonSchemaFormat


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """auto, none, required, or (mode `named`) one function by name.

    Attributes:
        at_most_one: the answer ends with its first call.
    """

    mode: str = "auto"
    name: str | None = None
    at_most_one: bool = False


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to generate one completion (n > 1 is n of these).

    Attributes:
        request_id: appears on every log line about the request.
        max_tokens: tokens to generate at most, None for the default, -1 for no limit but context.
        stop: stop strings, none of them empty; they never appear in the output.
        top_logprobs: None = no logprobs; 0..20 = logprobs with so many alternatives per token.
        stream: somebody reads while it is written, so parts are wanted as soon as they are certain.
        group: the same for completions of one request with the same prompt: they share its prefill.
        choices: how many of them there are.
        adapter: name of a configured adapter, never a path.
        draft_model: name of a configured draft model, never a path.
    """

    request_id: str
    prompt: ChatPrompt | TextPrompt | TokensPrompt
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: SamplingRequest = SamplingRequest()
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tool_choice: ToolChoice = ToolChoice()
    stream: bool = False
    group: str | None = None
    choices: int = 1
    adapter: str | None = None
    draft_model: str | None = None
    num_draft_tokens: int | None = None
