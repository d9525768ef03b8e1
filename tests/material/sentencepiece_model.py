"""A sentencepiece model file (BPE, byte fallback, no normalization) from a list of pieces.

Written field by field (protobuf wire format), so that no protobuf package is needed. It is the
oracle for the demo's fast tokenizer.
"""

import struct

from mlx_isolate_engine.model.demo_tokenizer import UNK, USER_DEFINED, Vocabulary

_VARINT, _FIXED32, _BYTES = 0, 5, 2
_UNKNOWN = 2


def sentencepiece_model(vocabulary: Vocabulary) -> bytes:
    """The serialized ModelProto."""
    pieces: list[bytes] = []
    rows = zip(vocabulary.texts, vocabulary.scores, vocabulary.types, strict=True)
    for number, (text, score, kind) in enumerate(rows):
        # sentencepiece sees spaces as U+2581, in pieces that are taken whole too.
        escaped = text.replace(" ", "\u2581") if kind == USER_DEFINED else text
        message = (
            _field(1, escaped.encode())
            + _key(2, _FIXED32)
            + struct.pack("<f", score)
            + _number(3, _UNKNOWN if number == UNK else kind)
        )
        pieces.append(_field(1, message))
    trainer = (
        _number(3, 2)  # model_type: BPE
        + _number(4, len(vocabulary.texts))
        + _number(35, 1)  # byte_fallback
        + _number(40, 3)  # unk_id
        + _number(41, 2)  # bos_id
        + _number(42, 1)  # eos_id
        + _number(43, 0)  # pad_id
    )
    normalizer = (
        _field(1, b"identity")
        + _number(3, 0)  # add_dummy_prefix
        + _number(4, 0)  # remove_extra_whitespaces
        + _number(5, 1)  # escape_whitespaces
    )
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _number(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content
