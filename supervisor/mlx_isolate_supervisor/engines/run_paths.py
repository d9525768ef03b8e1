"""Where the run directory lies, with the checks that it and the sockets in it need."""

import os
import stat
import sys
import tempfile
from pathlib import Path

from mlx_isolate_shared.errors import ConfigError

# Longest path a unix socket address may have, in bytes, without the closing NUL.
SOCKET_PATH_BYTES_MAX = {"linux": 107, "darwin": 103}


def run_directory(port: int, override: str | None = None) -> Path:
    """The run directory of the supervisor on `port`: short, per user and per port.

    Under XDG_RUNTIME_DIR where that is set, else under the temporary folder with the user id in
    its name. Only the path is computed; see `make_private_directory`.
    """
    if override is not None:
        return Path(override).absolute()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "mlx-isolate" / str(port)
    return Path(tempfile.gettempdir()) / f"mlx-isolate-{os.getuid()}" / str(port)


def make_private_directory(path: Path) -> None:
    """Create `path` with mode 0700, or check that what is there is ours and private.

    Raises:
        ConfigError: somebody else owns it, it is a link or no folder, or it cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        for folder in (path.parent, path):
            facts = folder.lstat()
            if not stat.S_ISDIR(facts.st_mode):
                raise ConfigError(f"{folder} is not a folder; remove it or choose another place.")
        facts = path.lstat()
        if facts.st_uid != os.getuid():
            raise ConfigError(f"{path} belongs to another user; remove it or choose another place.")
        if facts.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot create the folder {path}: {error.strerror}; choose another --run-dir."
        ) from error


def check_socket_path(path: Path) -> None:
    """Refuse a socket path that the system would cut off.

    Raises:
        ConfigError: naming the length, the limit and the remedy.
    """
    limit = SOCKET_PATH_BYTES_MAX.get(sys.platform, min(SOCKET_PATH_BYTES_MAX.values()))
    length = len(os.fsencode(path))
    if length > limit:
        raise ConfigError(
            f"the socket path {path} has {length} bytes and this system allows {limit}; "
            "choose a shorter run directory (--run-dir)."
        )
