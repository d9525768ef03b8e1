"""Files of a service on disk: written whole or not at all, and put back as they were."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.service.definition import File


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """What a path held; None = nothing."""

    path: str
    file: File | None


def remember(paths: Sequence[str]) -> tuple[Before, ...]:
    """What these paths hold now.

    Raises:
        CommandError: one cannot be read.
    """
    return tuple(Before(path=path, file=_read(Path(path))) for path in paths)


def restore(before: Sequence[Before]) -> None:
    """Make these paths hold what they held."""
    for one in before:
        if one.file is None:
            Path(one.path).unlink(missing_ok=True)
        else:
            write(one.file)


def make_folder(path: Path) -> None:
    """Make a folder of the user's alone, if it is not there.

    Raises:
        CommandError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise CommandError(f"cannot make the folder {path}: {error.strerror}") from error


def write(file: File) -> None:
    """Write a file with its mode; whoever reads it sees the old one or the new one.

    Raises:
        CommandError: it cannot be written.
    """
    path = Path(file.path)
    temporary: str | None = None
    make_folder(path.parent)
    try:
        # Private from its first byte: it may hold a key.
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(file.content)
            os.fchmod(stream.fileno(), file.mode)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def _read(path: Path) -> File | None:
    try:
        return File(path=str(path), mode=path.stat().st_mode & 0o777, content=path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
