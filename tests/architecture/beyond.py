"""What requests may hold that no official client's type has, for the docs page."""

from collections.abc import Mapping, Sequence

from mlx_isolate_engine.protocols.openapi import openapi_document

_AS_CHAT = "as in chat completions"
_MLX_LM = "as mlx-lm's"
_LOOKS_BACK = "how many tokens that penalty looks back"
BEYOND = {
    "temperature": "as in chat completions, 1 at most",
    "top_p": _AS_CHAT,
    "top_k": "as `--top-k`; 0 and -1 = off",
    "min_p": "as `--min-p`",
    "xtc_probability": _MLX_LM,
    "xtc_threshold": _MLX_LM,
    "repetition_penalty": _MLX_LM,
    "repetition_context_size": _LOOKS_BACK,
    "presence_penalty": _AS_CHAT,
    "presence_context_size": _LOOKS_BACK,
    "frequency_penalty": _AS_CHAT,
    "frequency_context_size": _LOOKS_BACK,
    "logit_bias": _AS_CHAT,
    "seed": _AS_CHAT,
    "response_format": _AS_CHAT,
    "chat_template_kwargs": 'arguments of the chat template, as `{"enable_thinking": false}`',
    "continue_final_message": "whether the last message is an answer that is to go on",
    "adapters": "name of one of `--adapters`",
    "draft_model": "name of the `--draft-model`",
    "num_draft_tokens": "as `--num-draft-tokens`",
}
_HEAD = (
    "What no official type has; OpenAI's and Anthropic's clients send it in `extra_body`. "
    "`keep_alive` and `ttl`, which every request may hold, are told in "
    "[operations.md](operations.md#several-models)."
)


def beyond(path: str, fields: Sequence[str]) -> set[str]:
    """What is read at a path and is none of the fields of its client's types."""
    document = openapi_document()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    names = (part["$ref"].rpartition("/")[2] for part in body["schema"]["allOf"])
    schemas = document["components"]["schemas"]
    return {field for name in names for field in schemas[name]["properties"]} - set(fields)


def section(apis: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of the page's section.

    Args:
        apis: path to the fields of its client's types.
    """
    lines = ["## Beyond the clients' types", "", _HEAD, ""]
    lines += ["| request field | at | here |", "| --- | --- | --- |"]
    for name, what in BEYOND.items():
        paths = [path for path, fields in apis.items() if name in beyond(path, fields)]
        at = "all" if len(paths) == len(apis) else ", ".join(f"`{path}`" for path in paths)
        lines.append(f"| `{name}` | {at} | {what} |")
    return lines
