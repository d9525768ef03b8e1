"""Models from the hub, through huggingface_hub and its cache, with progress.

Everything that library honours (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, proxies) is its
own affair; here are the file patterns, the progress lines and one clear sentence per failure.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_isolate_engine.model.errors import ModelError, first_sentence, is_disk_full
from mlx_isolate_engine.model.folder import check_folder
from mlx_isolate_shared.wire import Loading

Report = Callable[[Loading], None]

# What mlx-lm downloads (a test compares); asking it would cost the seconds of its import.
FILE_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]

# The least time between two progress lines; without it a fast download floods the pipe.
REPORT_INTERVAL_S = 0.2


def download(repo_id: str, report: Report) -> Path:
    """The folder of a repo's snapshot: the cached one if it is complete, else downloaded.

    Raises:
        ModelError: `model_missing`, `model_gated`, `model_offline`, `model_download`,
            `disk_full`, or `model_broken` for what came.
    """
    # Imported late: it reads its environment variables when it is imported.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    cached = _cached(repo_id, snapshot_download, FILE_PATTERNS)
    if cached is not None:
        return cached
    report(Loading(stage="download", detail=f"asking the hub for {repo_id}"))
    # Its transport errors (no route, reset, timeout) share the base class of its HTTP errors.
    transport_error: type[BaseException] = HfHubHTTPError.__bases__[0]
    try:
        folder = Path(
            snapshot_download(
                repo_id,
                allow_patterns=FILE_PATTERNS,
                tqdm_class=_bar_class(_Meter(report)),
            )
        )
    except (OSError, ValueError, RuntimeError, transport_error) as error:
        raise _translated(repo_id, error) from error
    if not any(folder.glob("model*.safetensors")):
        raise ModelError(
            "model_broken",
            f"{repo_id} holds no model*.safetensors, and GGUF and PyTorch's files are not read; "
            "name a repository in MLX's format or with safetensors.",
        )
    check_folder(folder)
    return folder


def _cached(repo_id: str, snapshot_download: Any, patterns: list[str]) -> Path | None:
    """The complete snapshot in the hub's cache, without asking the network."""
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=patterns, local_files_only=True))
        check_folder(folder)
    except (OSError, ValueError, ModelError):
        return None
    return folder


class _Meter:
    """Turns the library's bytes into `Loading` lines, at most one per REPORT_INTERVAL_S.

    Safe to call from the library's download threads.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._last = float("-inf")

    def show(self, done: float, total: float) -> None:
        """Report `done` of `total` bytes, unless the last line is too recent; the end always."""
        with self._lock:
            now = time.monotonic()
            if done < total and now - self._last < REPORT_INTERVAL_S:
                return
            self._last = now
            fraction = min(1.0, done / total) if total else None
            detail = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"
            self._report(Loading(stage="download", fraction=fraction, detail=detail))


def _bar_class(meter: _Meter) -> Any:
    """A progress bar class for huggingface_hub that draws nothing and feeds `meter`."""
    from tqdm.std import tqdm

    def draw_nothing(_bar: Any, *_args: Any, **_kwargs: Any) -> None:
        pass

    def count(bar: Any, n: float | None = 1) -> Any:
        moved = tqdm.update(bar, n)
        # Bytes come twice, as received and as written; files are counted too.
        if bar.unit == "B" and not str(bar.desc).startswith("Download"):
            meter.show(float(bar.n), float(bar.total or 0))
        return moved

    members = {
        "display": draw_nothing,
        "update": count,
        # Without these two the first bar starts a thread and a helper process.
        "monitor_interval": 0,
        "_lock": threading.RLock(),
    }
    return type("Bar", (tqdm,), members)


def _translated(repo_id: str, error: BaseException) -> ModelError:
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    match error:
        case GatedRepoError():
            return ModelError(
                "model_gated",
                f"{repo_id} asks for a licence to be accepted: do so on its page, then set "
                "HF_TOKEN to a token of that account.",
            )
        case RepositoryNotFoundError() | HFValidationError():
            return ModelError(
                "model_missing",
                f"there is no model {repo_id!r}: no such folder, and the hub has no such "
                "repository (or it is private and HF_TOKEN is not set).",
            )
        case LocalEntryNotFoundError() if HF_HUB_OFFLINE:
            return ModelError(
                "model_offline",
                f"{repo_id} is not complete in the hub's cache and HF_HUB_OFFLINE is set: "
                "unset it to download the model.",
            )
        case LocalEntryNotFoundError():
            return ModelError(
                "model_download",
                f"there is no folder {repo_id}, and the hub cannot be reached to download it: "
                f"{first_sentence(error.__cause__ or error, 160)}",
            )
        case OSError() if is_disk_full(error):
            return ModelError(
                "disk_full",
                f"the disk is full while downloading {repo_id}; free some space or set HF_HOME "
                "to a larger disk.",
            )
        case _:
            return ModelError(
                "model_download", f"downloading {repo_id} failed: {first_sentence(error, 200)}"
            )
