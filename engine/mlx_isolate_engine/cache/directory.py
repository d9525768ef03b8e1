"""The cache directory on disk: which files are ours, how many bytes, and who leaves first.

`<root>/<fingerprint>/<namespace hash>/<uuid>.safetensors`; a file that is being written is called
`<uuid>.<pid>-<start>.tmp` beside its later place; `<root>/quarantine/` holds a few damaged files.
Only regular files with such names in real folders with such names are ours: everything else,
symbolic links above all, is neither counted nor touched. The directory may be shared by several
engines, so any file may vanish at any time.
"""

import contextlib
import errno
import hashlib
import os
import re
import tempfile
import time
import uuid
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_isolate_engine.cache.owner import is_alive, own_mark

_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.([0-9]+-[0-9]+)\.tmp")
QUARANTINE = "quarantine"
# Damaged files kept for a look; without the limit a failing disk would fill itself with them.
QUARANTINED_MAX = 4


@dataclass(frozen=True, kw_only=True)
class OwnFile:
    """One file of ours; `owner` is the mark of the process that is writing it, if it is a part."""

    path: Path
    bytes: int
    modified_ns: int
    owner: str | None = None


class CacheDirectory:
    """Files of one cache root, whoever wrote them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Newest file time seen: a clock that was set back must not make new files look old.
        self._newest_ns = 0

    def folder(self, fingerprint: str, namespace: str) -> Path:
        """Where entries of one namespace of one model lie."""
        digest = hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()
        return self.root / fingerprint / digest

    def make_folder(self, fingerprint: str, namespace: str) -> Path:
        """As `folder`, made if missing.

        Raises:
            OSError: it cannot be made, or is a link to elsewhere.
        """
        folder = self.folder(fingerprint, namespace)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
            if each.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "a link in a folder's place", str(each))
        return folder

    def check_writable(self) -> None:
        """See whether files can be made here, which neither a folder's mode nor its owner tells.

        Raises:
            OSError: they cannot.
        """
        try:
            tempfile.TemporaryFile(dir=self.root).close()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.root)) from error

    def new_names(self, folder: Path) -> tuple[Path, Path]:
        """Fresh temporary and final path in a folder."""
        name = uuid.uuid4().hex
        return folder / f"{name}.{own_mark()}.tmp", folder / f"{name}.safetensors"

    def stamp(self, path: Path) -> None:
        """Mark a file as just used; a file that has vanished is no matter."""
        self._newest_ns = max(time.time_ns(), self._newest_ns + 1000)
        with contextlib.suppress(OSError):
            os.utime(path, ns=(self._newest_ns, self._newest_ns), follow_symlinks=False)

    def files(self, folder: Path | None = None) -> Iterator[OwnFile]:
        """Our files in one namespace folder, or in the whole directory, in no order.

        Raises:
            OSError: a folder cannot be read.
        """
        folders = [folder] if folder is not None else self._folders()
        for each in folders:
            for found in _scan(each):
                match = _TEMPORARY.fullmatch(found.name)
                if match is None and not _FILE.fullmatch(found.name):
                    continue
                with contextlib.suppress(OSError):  # gone, or not to be had
                    if not found.is_file(follow_symlinks=False):
                        continue
                    facts = found.stat(follow_symlinks=False)
                    self._newest_ns = max(self._newest_ns, facts.st_mtime_ns)
                    yield OwnFile(
                        path=Path(found.path),
                        bytes=facts.st_size,
                        modified_ns=facts.st_mtime_ns,
                        owner=match.group(1) if match else None,
                    )

    def names(self, folder: Path, known: Container[str] = ()) -> set[str]:
        """Names of finished files in a namespace folder, without a look at each.

        Args:
            known: names that are ours, which need no check.

        Raises:
            OSError: the folder cannot be read.
        """
        if not _is_real(folder):
            return set()
        entries = _scan(folder)
        return {
            entry.name
            for entry in entries
            if entry.is_file(follow_symlinks=False)
            and (entry.name in known or _FILE.fullmatch(entry.name))
        }

    def _folders(self) -> Iterator[Path]:
        for outer in _scan(self.root):
            if not outer.is_dir(follow_symlinks=False):
                continue
            if outer.name == QUARANTINE:
                yield Path(outer.path)
            elif _FOLDER.fullmatch(outer.name):
                for inner in _scan(Path(outer.path)):
                    if _FOLDER.fullmatch(inner.name) and inner.is_dir(follow_symlinks=False):
                        yield Path(inner.path)

    def remove_orphans(self) -> int:
        """Remove temporary files whose writer is gone; returns how many."""
        removed = 0
        for file in self.files():
            if file.owner is not None and not is_alive(file.owner):
                removed += _unlink(file.path)
        return removed

    def make_room(self, bytes_needed: int, bytes_max: int) -> tuple[list[Path], int]:
        """Evict the least recently used until `bytes_needed` more fit.

        Quarantined files go first. Files that are being written are counted and left alone.

        Returns:
            What has gone, and the bytes of what is left.
        """
        found = list(self.files())
        total = sum(file.bytes for file in found) + bytes_needed
        gone: list[Path] = []
        finished = [file for file in found if file.owner is None]
        for file in sorted(finished, key=lambda f: (not is_quarantined(f.path), f.modified_ns)):
            if total <= bytes_max:
                break
            self.remove(file.path)
            if os.path.lexists(file.path):
                continue  # the system does not let us: it stays, and may be read
            total -= file.bytes
            gone.append(file.path)
        return gone, total - bytes_needed

    def remove(self, path: Path) -> bool:
        """Delete one file and folders that it leaves empty; False if it had gone."""
        removed = _unlink(path)
        self._remove_empty(path.parent)
        return removed

    def quarantine(self, path: Path) -> None:
        """Move a damaged file aside, or remove it where that fails."""
        place = self.root / QUARANTINE
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            if place.is_symlink():
                raise NotADirectoryError(place)
            os.replace(path, place / path.name)
        except OSError:
            _unlink(path)
            return
        with contextlib.suppress(OSError):
            kept = sorted(self.files(place), key=lambda f: -f.modified_ns)
            for file in kept[QUARANTINED_MAX:]:
                _unlink(file.path)

    def _remove_empty(self, folder: Path) -> None:
        for each in (folder, folder.parent):
            if each != self.root:
                with contextlib.suppress(OSError):  # not empty, or somebody was faster
                    each.rmdir()


def _is_real(folder: Path) -> bool:
    """Whether a namespace's folder, and the one it lies in, are no links to elsewhere."""
    return not folder.is_symlink() and not folder.parent.is_symlink()


def is_quarantined(path: Path) -> bool:
    """Whether a file was set aside as damaged."""
    return path.parent.name == QUARANTINE


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
