"""Gemma 3's tokenizer as a fast one (tokenizer.json), rebuilt from the vocabulary in its GGUF file.

The vocabulary is a sentencepiece model (BPE, byte fallback, no normalization, no dummy prefix).
That form takes 6 to 10 s to load; as a fast tokenizer it takes 2.5 to 4 s. A piece's merges are all
the ways to make it from two other pieces, in the order of the pieces' scores.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlx_isolate_engine.model.errors import ModelError

# Token types in GGUF files, as in sentencepiece.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PAD, EOS, BOS, UNK = 0, 1, 2, 3
SPACE = "\u2581"

# Gemma's turns. It has no system turn: such text goes before the next user turn.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- set waiting = namespace(text='') %}
{%- for message in messages %}
{%- set content = (message.content or '') | trim %}
{%- if message.role in ['system', 'developer'] %}
{%- set waiting.text = waiting.text ~ content ~ '\\n\\n' %}
{%- elif message.role == 'assistant' %}
{{- '<start_of_turn>model\\n' ~ content ~ '<end_of_turn>\\n' }}
{%- else %}
{{- '<start_of_turn>user\\n' ~ waiting.text ~ content ~ '<end_of_turn>\\n' }}
{%- set waiting.text = '' %}
{%- endif %}
{%- endfor %}
{%- if waiting.text %}
{{- '<start_of_turn>user\\n' ~ waiting.text | trim ~ '<end_of_turn>\\n' }}
{%- endif %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}"""


@dataclass(frozen=True)
class Vocabulary:
    """Token texts with their scores and types, by token id."""

    texts: list[str]
    scores: list[float]
    types: list[int]


def read_vocabulary(reader: Any) -> Vocabulary:
    """The vocabulary of a GGUF file.

    Raises:
        ModelError: `demo_broken`.
    """
    fields = [reader.fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "scores")]
    fields.append(reader.fields.get("tokenizer.ggml.token_type"))
    if any(field is None for field in fields):
        raise ModelError("demo_broken", "the demo model's source holds no vocabulary.")
    texts, scores, types = (field.contents() for field in fields)
    if not len(texts) == len(scores) == len(types) == len(set(texts)):
        raise ModelError("demo_broken", "the vocabulary of the demo model's source is damaged.")
    return Vocabulary(list(texts), list(scores), list(types))


def merges_of(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best score first."""
    ids = {text: number for number, text in enumerate(vocabulary.texts)}
    pieces = [number for number, kind in enumerate(vocabulary.types) if kind == NORMAL]
    pieces.sort(key=lambda number: -vocabulary.scores[number])
    merges: list[tuple[str, str]] = []
    for number in pieces:
        text = vocabulary.texts[number]
        parts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += [(left, right) for left, right in parts if left in ids and right in ids]
    return merges


def tokenizer_json(vocabulary: Vocabulary) -> str:
    """The text of tokenizer.json."""
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(vocabulary)),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special(BOS, vocabulary), {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                _special(BOS, vocabulary),
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {
                vocabulary.texts[BOS]: {
                    "id": vocabulary.texts[BOS],
                    "ids": [BOS],
                    "tokens": [vocabulary.texts[BOS]],
                }
            },
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.texts[UNK],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(vocabulary.texts)},
            "merges": merges_of(vocabulary),
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer_config.json.

    The added tokens are named here too: without them the library parses tokenizer.json once more
    only to find them, which costs a fifth of the load.
    """
    added = {str(token["id"]): token for token in _added_tokens(vocabulary)}
    return {
        "added_tokens_decoder": {
            number: {key: value for key, value in token.items() if key != "id"}
            for number, token in added.items()
        },
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.texts[BOS],
        "eos_token": vocabulary.texts[EOS],
        "pad_token": vocabulary.texts[PAD],
        "unk_token": vocabulary.texts[UNK],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32_768,
    }


def _special(number: int, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"SpecialToken": {"id": vocabulary.texts[number], "type_id": 0}}


def _added_tokens(vocabulary: Vocabulary) -> Iterable[dict[str, Any]]:
    """Control tokens that mean something, and tokens that are taken whole wherever they occur.

    The 6,242 unused control tokens stay plain vocabulary, which nothing encodes to: as added tokens
    they would cost every load a second.
    """
    for number, kind in enumerate(vocabulary.types):
        is_unused = kind == CONTROL and vocabulary.texts[number].startswith("<unused")
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and not is_unused:
            yield {
                "id": number,
                "content": vocabulary.texts[number],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
