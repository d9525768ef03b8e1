"""A reader of prompt cache files, written from docs/kv-format.md alone: it imports nothing of ours.

What it cannot know from that page, the page lacks.
"""

import base64
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U8": "u1"}
OURS = "0.mlx_isolate."
HEADER_SUM = re.compile(rb'"0\.mlx_isolate\.header_sum": ?"([0-9a-f]{8})"')

Tree = Any  # an array, a Python value, or a list of these


class Damaged(Exception):
    """The file is not what the page says."""


class SecondReader:
    """One file, wholly read and checked.

    Attributes:
        metadata: text by key.
        tokens: what the entry stands for.
        classes: names of the caches.
        states: for each cache its state, rounded tensors cut to the tokens.
    """

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        self._start = 8 + length
        if self._start % 16384 or length > 64 << 20 or self._start > len(raw):
            raise Damaged("header length")
        head = raw[: self._start]
        _check_header_sum(head)
        header: dict[str, Any] = json.loads(head[8:].decode("ascii"))
        self.metadata: dict[str, str] = header.pop("__metadata__")
        if self._ours("version") != "1":
            raise Damaged("version")
        self.tokens = [int(t) for t in np.frombuffer(base64.b64decode(self._ours("tokens")), "<u4")]
        self._values = {
            text: self.metadata[key[:-1] + "1"]
            for key, text in self.metadata.items()
            if re.fullmatch(r"2\.\d+\.0", key)
        }
        arrays = self._arrays(raw, header)
        classes = sorted((k for k in self.metadata if k[:2] == "1."), key=lambda k: int(k[2:]))
        self.classes = [self.metadata[key] for key in classes]
        tree = _nested(arrays)
        self.states: list[Tree] = [tree[place] for place in range(len(self.classes))]

    def _ours(self, key: str) -> str:
        return self.metadata[OURS + key]

    def _arrays(self, raw: bytes, header: dict[str, Any]) -> dict[str, Any]:
        sums = json.loads(self._ours("tensor_sums"))
        rounded = json.loads(self._ours("rounded"))
        at, size_before = 0, None
        arrays: dict[str, Any] = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            if begin != at or (size_before is not None and end - begin > size_before):
                raise Damaged("places")
            at, size_before = end, end - begin
            data = raw[self._start + begin : self._start + end]
            if len(data) != end - begin or f"{zlib.crc32(data):08x}" != sums[name]:
                raise Damaged(f"tensor {name}")
            array = np.frombuffer(data, DTYPES[entry["dtype"]]).reshape(entry["shape"])
            if name in rounded:
                count = len(self.tokens)
                if array.shape[2] != count // 256 * 256 + 256 or array[:, :, count:].any():
                    raise Damaged("rounding")
                array = array[:, :, :count]
            arrays[name] = self._value(name, array)
        if self._start + at != len(raw):
            raise Damaged("file length")
        return arrays

    def _value(self, name: str, array: Any) -> Any:
        match self._values.get(name):
            case None:
                return array
            case "scalar":
                return array.item()
            case "string":
                return "".join(map(chr, array.tolist()))
            case "none":
                return None
            case other:
                raise Damaged(f"a value that is {other}")


def _check_header_sum(head: bytes) -> None:
    found = HEADER_SUM.search(head)
    if found is None:
        raise Damaged("no header sum")
    zeroed = head[: found.start(1)] + b"00000000" + head[found.end(1) :]
    if f"{zlib.crc32(zeroed):08x}".encode() != found[1]:
        raise Damaged("header sum")


def _nested(arrays: dict[str, Any]) -> dict[int, Tree]:
    """The tree whose paths the names are: numbers as keys at every level."""
    root: dict[int, Any] = {}
    for name, value in arrays.items():
        *path, last = map(int, name.split("."))
        place = root
        for step in path:
            place = place.setdefault(step, {})
        place[last] = value
    return root
