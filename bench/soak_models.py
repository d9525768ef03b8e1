"""The models of a soak: built, configured, and asked cold what they say."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.oracle import oracle
from tests.material.models import ModelSpec, build_model

from bench.soak_clients import Expected
from bench.soak_plan import LONG_TOKENS, MODELS, SHORT_TOKENS

CONTEXT = 8192
SPECS = {
    "full": ModelSpec(kind="full", context=CONTEXT),
    "sliding": ModelSpec(kind="sliding", context=CONTEXT),
    "parrot": ModelSpec(kind="parrot", template="tools", context=CONTEXT),
}
# Where the best two tokens are as near as this (log probabilities), another order of the same
# additions, beside other rows of a batch, may choose the other.
GAP_MIN = 1e-3


def build_models(home: Path) -> dict[str, Path]:
    """The folder of each model, made anew."""
    folders = {name: build_model(home / name, SPECS[name]) for name in MODELS}
    # The parrot would repeat the list of tools.
    template = folders["parrot"] / "chat_template.jinja"
    text = template.read_text()
    begin, end = text.index("{%- if tools %}"), text.index("{% endif %}") + len("{% endif %}")
    template.write_text(text[:begin] + text[end:])
    return folders


def cold_answers(
    folders: Mapping[str, Path], prompts: Mapping[str, tuple[str, ...]]
) -> dict[tuple[str, str, int], Expected]:
    """What mlx-lm itself says to each prompt, as a chat and as plain text."""
    found: dict[tuple[str, str, int], Expected] = {}
    for model, folder in folders.items():
        keys: list[tuple[str, str, int]] = []
        asked: list[dict[str, Any]] = []
        whole: list[str | None] = []
        limit = max(SHORT_TOKENS)
        for number, prompt in enumerate(prompts[model]):
            keys.append((model, "chat", number))
            turns = [{"role": "user", "content": prompt}]
            asked.append({"messages": turns, "max_tokens": limit})
            whole.append(prompt if model == "parrot" else None)
            if model != "parrot":
                keys.append((model, "completions", number))
                asked.append({"prompt": prompt, "max_tokens": limit})
                whole.append(None)
        for key, answer, all_of_it in zip(keys, oracle(folder, asked), whole, strict=True):
            found[key] = _expected(answer, limit, all_of_it)
    return found


def _expected(answer: Mapping[str, Any], limit: int, whole: str | None) -> Expected:
    if whole is not None and not whole.startswith(answer["text"]):
        raise SystemExit("the parrot does not repeat what it is told")
    close = [at for at, gap in enumerate(answer["gaps"]) if gap < GAP_MIN]
    tokens_max = min([limit, *close])
    if tokens_max == 0:
        raise SystemExit("the first token of a prompt is too close a choice: take another seed")
    if whole is not None and tokens_max == limit:
        tokens_max = LONG_TOKENS
    return Expected(pieces=tuple(answer["pieces"]), tokens_max=tokens_max, whole=whole)


def write_config(
    file: Path, folders: Mapping[str, Path], changes: Mapping[str, Any] | None = None
) -> None:
    """Put the configuration in place in one step, with further keys for some models."""
    models = {
        name: {"path": str(folder), **(changes or {}).get(name, {})}
        for name, folder in folders.items()
    }
    content = {"models": models, "hooks": {"on_startup": {"preload": list(folders)}}}
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(content))
    temporary.replace(file)
