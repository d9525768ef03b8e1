"""The header of a cache file: bytes to typed facts and back, pure and without mlx.

The file is a safetensors file in the scheme of mlx-lm's prompt caches (see docs/kv-format.md):
mlx-lm reads its own keys, everything of ours lies in its metadata dictionary under `mlx_isolate`.
"""

import base64
import binascii
import json
import re
import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import msgspec

from mlx_isolate_engine.cache.damage import Damage

LAYOUT_VERSION = 1
# Tensor data starts at a multiple of this, so that reads of whole pages can bypass the page cache.
DATA_ALIGNMENT = 16 * 1024
# A longer header is damage; without the limit a flipped length field would be read into memory.
HEADER_BYTES_MAX = 64 * 1024 * 1024

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "C64": 8,
}  # fmt: skip

_OURS = "0.mlx_isolate."
_SUM_KEY = f'"{_OURS}header_sum":"'.encode()
_SUM_FIELD = re.compile(re.escape(_SUM_KEY) + rb"([0-9a-f]{8})\"")
_METADATA = "__metadata__"
_Natural = Annotated[int, msgspec.Meta(ge=0)]
# More axes than any cache has, and fewer than mlx takes.
_Shape = Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=8)]


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor as it stands in the JSON text."""

    dtype: str
    shape: _Shape
    data_offsets: tuple[_Natural, _Natural]


# Types are checked while the text is parsed: a checksum says nothing about who wrote it.
_decode_document = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode
_decode_place = msgspec.json.Decoder(_Place).decode
_decode_sums = msgspec.json.Decoder(dict[str, str]).decode
_decode_names = msgspec.json.Decoder(list[str]).decode
# How a header fails that is not as it should be.
_WRONG = (msgspec.DecodeError, ValueError, KeyError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor: safetensors dtype, shape, and where its bytes lie in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def bytes(self) -> int:
        """Length of its data."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class EntryFacts:
    """What a file says about its entry.

    Attributes:
        model: what mlx-lm's generate loads by default with this file (folder or repo id).
        tokenizer_config: JSON text for the same tool.
        model_id: the name clients use.
        fingerprint: see fingerprint.py; a file is only read by an engine with the same one.
        tokenizer: hash of the tokenizer's files.
        key: the exact tokens, big-endian 32 bit (token_index.token_key).
        kind: which part of a conversation ends here.
        cuttable: the entry may serve a shorter prefix.
        created: seconds since the epoch.
        classes: mlx-lm class names, one a cache.
        scalars: names of tensors that stand for Python values, each with `scalar`, `string` or
            `none`.
        rounded: names of tensors whose third axis is padded with zeros beyond the tokens.
    """

    model: str
    tokenizer_config: str
    model_id: str
    namespace: str
    fingerprint: str
    tokenizer: str
    key: bytes
    kind: str
    cuttable: bool
    created: float
    classes: tuple[str, ...]
    scalars: tuple[tuple[str, str], ...]
    rounded: frozenset[str]

    @property
    def length(self) -> int:
        """Tokens that the entry stands for."""
        return len(self.key) // 4


@dataclass(frozen=True, kw_only=True)
class Header:
    """A whole header; `sums` are CRC-32 by tensor name, `data_start` bytes from the file's start."""

    facts: EntryFacts
    tensors: tuple[TensorInfo, ...]
    sums: Mapping[str, int]
    data_start: int

    @property
    def file_bytes(self) -> int:
        """Length that the file must have."""
        return self.data_start + (self.tensors[-1].end if self.tensors else 0)


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorInfo, ...]:
    """Place (name, dtype, shape) in the data section: big ones first, scalars last, no holes."""
    sized = [(DTYPE_BYTES[dtype] * prod(shape), n, dtype, shape) for n, dtype, shape in tensors]
    placed: list[TensorInfo] = []
    at = 0
    for size, name, dtype, shape in sorted(sized, key=lambda t: -t[0]):
        placed.append(TensorInfo(name=name, dtype=dtype, shape=shape, start=at, end=at + size))
        at += size
    return tuple(placed)


def encode_header(
    facts: EntryFacts, tensors: Iterable[TensorInfo], sums: Mapping[str, int]
) -> bytes:
    """The file up to its data, padded; its length does not depend on the sums' values.

    Args:
        sums: CRC-32 by tensor name; missing ones are written as zero.
    """
    placed = tuple(tensors)
    document: dict[str, Any] = {_METADATA: _metadata(facts, placed, sums)}
    for t in placed:
        place = [t.start, t.end]
        document[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": place}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()
    total = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    raw = struct.pack("<Q", total - 8) + text + b" " * (total - 8 - len(text))
    return raw.replace(_SUM_KEY + b"00000000", _SUM_KEY + f"{zlib.crc32(raw):08x}".encode(), 1)


def _metadata(
    facts: EntryFacts, tensors: tuple[TensorInfo, ...], sums: Mapping[str, int]
) -> dict[str, str]:
    tokens = array("I", facts.key)
    tokens.byteswap()
    ours = {
        "version": str(LAYOUT_VERSION),
        "header_sum": "00000000",
        "model_id": facts.model_id,
        "namespace": facts.namespace,
        "fingerprint": facts.fingerprint,
        "tokenizer": facts.tokenizer,
        "tokens": base64.b64encode(tokens.tobytes()).decode(),
        "kind": facts.kind,
        "cuttable": str(int(facts.cuttable)),
        "created": f"{facts.created:.3f}",
        "rounded": json.dumps(sorted(facts.rounded)),
        "tensor_sums": json.dumps({t.name: f"{sums.get(t.name, 0):08x}" for t in tensors}),
    }
    metadata = {"0.model": facts.model, "0.tokenizer_config": facts.tokenizer_config}
    metadata |= {_OURS + name: value for name, value in ours.items()}
    metadata |= {f"1.{at}": name for at, name in enumerate(facts.classes)}
    metadata["2.0"] = ""  # mlx-lm keeps the list from being empty with this
    for at, (name, kind) in enumerate(facts.scalars, start=1):
        metadata |= {f"2.{at}.0": name, f"2.{at}.1": kind}
    return metadata


def header_length(first: bytes) -> int:
    """Length of the whole header by its first 8 bytes.

    Raises:
        Damage: it cannot be one of ours.
    """
    if len(first) < 8:
        raise Damage("length", f"{len(first)} bytes")
    total = 8 + int(struct.unpack("<Q", first[:8])[0])
    if total > HEADER_BYTES_MAX or total % DATA_ALIGNMENT:
        raise Damage("header", f"header of {total} bytes")
    return total


def decode_header(raw: bytes) -> Header:
    """Parse and check a whole header (`header_length` bytes).

    Raises:
        Damage: `length`, `header` or `version`.
    """
    document, metadata = _parse(raw)
    try:
        tensors = [_tensor(name, _decode_place(text)) for name, text in document.items()]
        facts = _facts(metadata)
        sums = _decode_sums(metadata[_OURS + "tensor_sums"])
        header = Header(
            facts=facts,
            tensors=tuple(sorted(tensors, key=lambda t: (t.start, t.end))),
            sums={name: int(value, 16) for name, value in sums.items()},
            data_start=len(raw),
        )
    except _WRONG as error:
        raise Damage("header", type(error).__name__) from error
    _check_places(header)
    return header


def decode_facts(raw: bytes, file_bytes: int) -> EntryFacts:
    """What a whole header says about its entry; as `decode_header` without a look at each tensor.

    For the scan at a start, of which nothing is believed later.

    Args:
        file_bytes: length of the file; compared with where the last tensor ends.

    Raises:
        Damage: `length`, `header` or `version`.
    """
    document, metadata = _parse(raw)
    try:
        places = list(document.values())
        end = _decode_place(places[-1]).data_offsets[1] if places else 0
        facts = _facts(metadata)
    except _WRONG as error:
        raise Damage("header", type(error).__name__) from error
    if len(raw) + end == file_bytes:
        return facts
    # Another writer may name the tensors in another order.
    expected = decode_header(raw).file_bytes
    if expected != file_bytes:
        raise Damage("length", f"{file_bytes} bytes of {expected}")
    return facts


def _parse(raw: bytes) -> tuple[dict[str, msgspec.Raw], dict[str, str]]:
    """Tensors and metadata of a header of this version whose checksum is right."""
    if header_length(raw) != len(raw):
        raise Damage("length", "header cut off")
    _check_sum(raw)
    try:
        document = _decode_document(raw[8:])
        metadata = _decode_metadata(document.pop(_METADATA))
        version = metadata[_OURS + "version"]
    except _WRONG as error:
        raise Damage("header", type(error).__name__) from error
    if version != str(LAYOUT_VERSION):
        raise Damage("version", version[:20])
    return document, metadata


def _tensor(name: str, place: _Place) -> TensorInfo:
    start, end = place.data_offsets
    return TensorInfo(name=name, dtype=place.dtype, shape=place.shape, start=start, end=end)


def _check_sum(raw: bytes) -> None:
    found = _SUM_FIELD.search(raw)
    if found is None:
        raise Damage("header", "no checksum")
    start, end = found.span(1)
    if zlib.crc32(raw[:start] + b"00000000" + raw[end:]) != int(found.group(1), 16):
        raise Damage("header", "checksum")


def _check_places(header: Header) -> None:
    at = 0
    for tensor in header.tensors:
        size = DTYPE_BYTES.get(tensor.dtype, -1) * prod(tensor.shape)
        if tensor.start != at or tensor.bytes != size:
            raise Damage("header", f"place of {tensor.name}")
        at = tensor.end
    if set(header.sums) != {t.name for t in header.tensors}:
        raise Damage("header", "checksums of other tensors")


def _facts(metadata: Mapping[str, str]) -> EntryFacts:
    tokens = array("I", base64.b64decode(metadata[_OURS + "tokens"], validate=True))
    tokens.byteswap()  # little-endian here, big-endian in a key
    classes: list[str] = []
    while (name := metadata.get(f"1.{len(classes)}")) is not None:
        classes.append(name)
    scalars: list[tuple[str, str]] = []
    while (name := metadata.get(f"2.{len(scalars) + 1}.0")) is not None:
        scalars.append((name, metadata[f"2.{len(scalars) + 1}.1"]))
    return EntryFacts(
        model=metadata["0.model"],
        tokenizer_config=metadata["0.tokenizer_config"],
        model_id=metadata[_OURS + "model_id"],
        namespace=metadata[_OURS + "namespace"],
        fingerprint=metadata[_OURS + "fingerprint"],
        tokenizer=metadata[_OURS + "tokenizer"],
        key=tokens.tobytes(),
        kind=metadata[_OURS + "kind"],
        cuttable=metadata[_OURS + "cuttable"] == "1",
        created=float(metadata[_OURS + "created"]),
        classes=tuple(classes),
        scalars=tuple(scalars),
        rounded=frozenset(_decode_names(metadata[_OURS + "rounded"])),
    )


assert issubclass(binascii.Error, ValueError)  # what decode_header relies on for broken base64
assert array("I").itemsize == 4
