"""A byte-level tokenizer of 512 tokens, written in the form that `mlx_lm.load` reads.

Ids 0..255 are the bytes of that value, then the special tokens, then some merges (so that a
token can hold several characters and a stop string can end inside one), then unused ids.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.material.templates import Template

VOCAB_SIZE = 512

USER, ASSISTANT = 256, 257
PAD, BOS, END, SYSTEM, TOOL = 264, 265, 266, 267, 268
THINK_START, THINK_END, TOOL_CALL_START, TOOL_CALL_END = 272, 273, 274, 275
FIRST_MERGE = 288

SPECIAL_TOKENS = {
    PAD: "<|pad|>",
    BOS: "<|bos|>",
    END: "<|end|>",
    SYSTEM: "<|system|>",
    USER: "<|user|>",
    ASSISTANT: "<|assistant|>",
    TOOL: "<|tool|>",
}
THINKING_TOKENS = {THINK_START: "<think>", THINK_END: "</think>"}
TOOL_CALL_TOKENS = {TOOL_CALL_START: "<tool_call>", TOOL_CALL_END: "</tool_call>"}

# In order of preference, as byte-pair merges are.
MERGES = (
    "t h|th e|i n|in g|a n|an d|e r|o n|r e|o u|s t|e n|l l|h e|w o|wo r|l d|wor ld|he ll|hell o"
    "|c o|co de|d e|q u|i s|t o|f o|fo r|y ou|- -|= =|  "
)


def byte_to_char() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {byte: chr(byte) for byte in kept}
    spare = 256
    for byte in range(256):
        if byte not in chars:
            chars[byte] = chr(spare)
            spare += 1
    return [chars[byte] for byte in range(256)]


def _merges() -> list[tuple[str, str]]:
    pairs = [tuple(part.split(" ")) for part in MERGES.split("|")]
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2 and all(pair)]


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token texts to ids, and the merges whose parts exist by then."""
    vocabulary = {char: byte for byte, char in enumerate(byte_to_char())}
    used: list[tuple[str, str]] = []
    for left, right in _merges():
        if left in vocabulary and right in vocabulary and left + right not in vocabulary:
            vocabulary[left + right] = FIRST_MERGE + len(used)
            used.append((left, right))
    return vocabulary, used


def merge_texts() -> dict[int, str]:
    """Id to text of every token that is longer than one byte and not special."""
    vocabulary, _ = _vocabulary()
    return {number: text for text, number in vocabulary.items() if number >= FIRST_MERGE}


@dataclass(frozen=True)
class AddedToken:
    """An entry of added_tokens, as tokenizer.json names the fields."""

    id: int
    content: str
    special: bool
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


def _added_tokens(template: Template) -> list[AddedToken]:
    texts = dict(SPECIAL_TOKENS)
    if template.has_thinking:
        texts |= THINKING_TOKENS
    if template.has_tools:
        texts |= TOOL_CALL_TOKENS
    taken = merge_texts()
    return [
        AddedToken(
            id=number,
            content=texts.get(number, f"<|unused_{number}|>"),
            special=number not in THINKING_TOKENS and number not in TOOL_CALL_TOKENS,
        )
        for number in range(256, VOCAB_SIZE)
        if number not in taken
    ]


def write_tokenizer(folder: Path, template: Template, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    vocabulary, merges = _vocabulary()
    added = _added_tokens(template)
    # Named in the vocabulary too: else the library numbers added tokens anew, from its end.
    vocabulary |= {token.content: token.id for token in added}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [asdict(token) for token in added],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template.text is not None:
        (folder / "chat_template.jinja").write_text(template.text)
