"""The converted demo folder's manifest: which files, how long, with which checksums."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

# Raised when the converted files change, so that an older folder is converted anew.
FORMAT = 1
MANIFEST = "manifest.json"
# Files up to this size are hashed at every start; weights, which take a second, only on demand.
HASHED_BYTES_MAX = 1_000_000

Piece = dict[str, Any]


def is_complete(folder: Path, source_sha256: str) -> bool:
    """Whether a finished conversion of this format lies there: every file with its size.

    The checksums of weights and tokenizer are left to `damaged_files`.
    """
    pieces = read_pieces(folder / MANIFEST, source_sha256)
    return bool(pieces) and not _damaged(folder, pieces, HASHED_BYTES_MAX)


def damaged_files(folder: Path, source_sha256: str) -> list[str]:
    """Names of the files whose size or checksum differs from the manifest's."""
    return _damaged(folder, read_pieces(folder / MANIFEST, source_sha256), None)


def is_whole(path: Path, piece: Piece) -> bool:
    """Whether a file has a piece's size and checksum."""
    return (
        path.is_file() and path.stat().st_size == piece["size"] and sha256(path) == piece["sha256"]
    )


def read_pieces(path: Path, source_sha256: str) -> dict[str, Piece]:
    """The pieces that a manifest or journal lists; empty if it is missing, torn or of another kind."""
    try:
        value: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    if value.get("format") != FORMAT or value.get("source_sha256") != source_sha256:
        return {}
    files = value.get("files")
    if not isinstance(files, dict):
        return {}
    return {
        name: piece
        for name, piece in files.items()
        if isinstance(piece, dict) and {"size", "sha256"} <= piece.keys()
    }


def write_pieces(path: Path, source_sha256: str, dtype: str, pieces: dict[str, Piece]) -> None:
    """Write a manifest or journal whole or not at all."""
    content = {
        "format": FORMAT,
        "source_sha256": source_sha256,
        "dtype": dtype,
        "files": dict(sorted(pieces.items())),
    }
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sha256(path: Path) -> str:
    """A file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(folder: Path, pieces: dict[str, Piece], hashed_bytes_max: int | None) -> list[str]:
    damaged: list[str] = []
    for name, piece in pieces.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        is_hashed = hashed_bytes_max is None or size <= hashed_bytes_max
        if size != piece["size"] or (is_hashed and sha256(path) != piece["sha256"]):
            damaged.append(name)
    return damaged
