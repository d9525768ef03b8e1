"""The run directory: the lock of one supervisor, its engines' sockets and records.

Owns what lies in the directory. Knows nothing of models' states; orphaned engines are ended by
`orphans`.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.engines.run_paths import check_socket_path, make_private_directory

LOCK_NAME = "supervisor.lock"
SOCKET_SUFFIX = ".sock"
# Length of the longest socket name: token, dash, a number of up to ten digits, suffix.
SOCKET_NAME_MAX = 4 + 1 + 10 + len(SOCKET_SUFFIX)


class RunDirectory:
    """A locked run directory. Make one with `RunDirectory.acquire`, give it back with `release`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        """Adopt a directory whose lock is held by `lock_fd`."""
        self.path = path
        self._lock_fd = lock_fd
        # A new token for every supervisor: an engine that an earlier one left cannot collide.
        self._token = secrets.token_hex(2)
        self._sockets = 0

    @classmethod
    def acquire(cls, path: Path) -> "RunDirectory":
        """Create (0700), check and lock the directory.

        Raises:
            ConfigError: another supervisor holds it, a socket path in it would be too long, it is
                not private, or it cannot be written.
        """
        check_socket_path(path / ("x" * SOCKET_NAME_MAX))
        return cls(path, _make_and_lock(path))

    def new_socket_path(self) -> Path:
        """A path that no engine of this or an earlier supervisor has used.

        Raises:
            OSError: the directory was removed, and cannot be made anew.
        """
        self._restore()
        self._sockets += 1
        path = self.path / f"{self._token}-{self._sockets}{SOCKET_SUFFIX}"
        check_socket_path(path)
        return path

    def remove_stray_sockets(self) -> int:
        """Unlink every socket in the directory; for a start, after orphans have been ended."""
        removed = 0
        for stray in self.path.glob(f"*{SOCKET_SUFFIX}"):
            with contextlib.suppress(OSError):  # a folder, say, which is not ours
                stray.unlink()
                removed += 1
        return removed

    def _restore(self) -> None:
        """Make the directory and its lock anew if they are gone: cleaners sweep such places."""
        try:
            if os.path.samestat((self.path / LOCK_NAME).lstat(), os.fstat(self._lock_fd)):
                return
        except OSError:
            pass
        try:
            lock_fd = _make_and_lock(self.path)
        except ConfigError as error:
            raise OSError(errno.ENOENT, str(error)) from error
        os.close(self._lock_fd)
        self._lock_fd = lock_fd

    def release(self) -> None:
        """Give the lock back. The directory and the lock file stay: removing them would race."""
        os.close(self._lock_fd)


def holder_of(path: Path) -> str | None:
    """The pid of the supervisor that holds the run directory `path`, or "unknown"; None = none."""
    try:
        with (path / LOCK_NAME).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return file.read(32).decode(errors="replace").strip() or "unknown"
    except OSError:
        return None
    return None


def _make_and_lock(path: Path) -> int:
    make_private_directory(path)
    try:
        lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(lock_fd, path)
            os.ftruncate(lock_fd, 0)
            os.write(lock_fd, f"{os.getpid()}\n".encode())
        except BaseException:
            os.close(lock_fd)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot write in the run directory {path}: {error.strerror}; choose another --run-dir."
        ) from error
    return lock_fd


def _lock(lock_fd: int, path: Path) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(lock_fd, 32).decode(errors="replace").strip() or "unknown"
        raise ConfigError(
            f"another supervisor (pid {holder}) uses the run directory {path}; "
            "stop it or choose another port or run directory."
        ) from error
