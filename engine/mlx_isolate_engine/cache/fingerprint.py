"""What KV state depends on, as one hash: an entry is only ever used under the same one.

Covers weights and with them their types (also a file replaced in place by one of the same size), every configuration and
tokenizer file, adapters, the KV scheme, mlx-lm's minor version and the layout version. Weights are
not read in whole, which would take longer than loading them: their headers, samples of their data
and the file's size and times stand for them. The change time cannot be set by a program, so a
replacement shows even where it keeps size, samples and modification time; a false alarm only costs
misses.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx_lm

from mlx_isolate_engine.cache.kv_file import LAYOUT_VERSION

_WEIGHT_SUFFIXES = {".safetensors", ".npz", ".gguf", ".bin"}
# Configuration, tokenizer, templates and model code; anything else in a folder is prose.
_TEXT_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".yaml"}
_TOKENIZER_WORDS = ("token", "vocab", "merges", "chat_template", ".jinja", "spm", "tekken")
_SAMPLES = 32
_SAMPLE_BYTES = 4096
_HEADER_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Both as 32 hexadecimal digits.

    Attributes:
        value: everything that KV state depends on.
        tokenizer: the part of it that turns text into tokens.
    """

    value: str
    tokenizer: str


def fingerprint(
    folder: Path,
    *,
    kv_scheme: str,
    template: str = "",
    others: Iterable[Path] = (),
) -> Fingerprint:
    """The fingerprint of a model folder as it is used now.

    Args:
        kv_scheme: how KV state is kept, e.g. `bits=8 group=64 start=5000`.
        template: a chat template given from outside, "" for the model's own.
        others: folders of adapters and draft models that take part.

    Raises:
        OSError: a file cannot be read.
    """
    tokenizer = hashlib.blake2b(template.encode(), digest_size=16)
    whole = hashlib.blake2b(digest_size=16)
    minor = ".".join(mlx_lm.__version__.split(".")[:2])
    for fact in (f"layout={LAYOUT_VERSION}", f"mlx_lm={minor}", kv_scheme, template):
        whole.update(fact.encode() + b"\0")
    for at, each in enumerate((folder, *others)):
        for path in sorted(p for p in each.iterdir() if p.is_file()):
            digest = _file_digest(path)
            if digest is None:
                continue
            whole.update(path.name.encode() + b"\0" + digest)
            if at == 0 and any(word in path.name for word in _TOKENIZER_WORDS):
                tokenizer.update(path.name.encode() + b"\0" + digest)
        whole.update(b"\1")
    return Fingerprint(value=whole.hexdigest(), tokenizer=tokenizer.hexdigest())


def _file_digest(path: Path) -> bytes | None:
    if path.suffix in _WEIGHT_SUFFIXES:
        return _weights_digest(path)
    if path.suffix in _TEXT_SUFFIXES:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
    return None


def _weights_digest(path: Path) -> bytes:
    facts = path.stat()
    digest = hashlib.blake2b(digest_size=16)
    digest.update(struct.pack("<qqq", facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            digest.update(first + file.read(min(length, _HEADER_BYTES_MAX)))
        last = max(0, facts.st_size - _SAMPLE_BYTES)
        for at in range(_SAMPLES):
            file.seek(last * at // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
