"""Which BLAS is preloaded into CPU engines on Linux.

MLX's Linux wheel for the CPU carries the reference BLAS, whose float32 matrix product is some
fifty times slower than an optimized one. Knows where systems and the `mkl` wheel put theirs; the
engine itself says in its facts which BLAS it runs on.
"""

import glob
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import msgspec

from mlx_isolate_shared.errors import ConfigError

# Threaded builds first; the plain name is a link that a distribution's alternatives system sets.
OPENBLAS_PATTERNS = (
    "/usr/lib/*/openblas-pthread/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib/*/openblas-openmp/libopenblas.so.0",
    "/usr/lib64/libopenblaso.so.0",
    "/usr/lib/*/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",
)
GPU_DISTRIBUTIONS = ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")


class BlasChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen.

    Attributes:
        path: library to preload, None for none.
        reason: one phrase for the log, e.g. `OpenBLAS of the system`.
    """

    path: str | None
    reason: str

    def environment(self, inherited: str | None) -> dict[str, str]:
        """What to add to an engine's environment; `inherited` is the LD_PRELOAD there is."""
        if self.path is None:
            return {}
        return {"LD_PRELOAD": f"{self.path}:{inherited}" if inherited else self.path}


def choose_blas(setting: str) -> BlasChoice:
    """Resolve `auto`, `off` or a path.

    Raises:
        ConfigError: a path that names no file, or that cannot be preloaded here.
    """
    if setting == "off":
        return BlasChoice(path=None, reason="off by configuration")
    if setting != "auto":
        return _named(setting)
    if sys.platform != "linux":
        return BlasChoice(path=None, reason="the system's own")
    if (gpu := _gpu_backend()) is not None:
        return BlasChoice(path=None, reason=f"not needed, {gpu} is installed")
    inherited = os.environ.get("LD_PRELOAD", "")
    if "blas" in inherited or "mkl" in inherited:
        return BlasChoice(path=None, reason="already in LD_PRELOAD")
    if (found := _system_openblas()) is not None:
        return BlasChoice(path=found, reason="OpenBLAS of the system")
    if (found := _mkl_wheel()) is not None:
        return BlasChoice(path=found, reason="MKL of the mkl package")
    return BlasChoice(
        path=None,
        reason="no optimized BLAS found: CPU engines will be slow; "
        "install libopenblas0-pthread, or the mkl extra",
    )


def _named(setting: str) -> BlasChoice:
    path = Path(setting).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"--blas: {setting} is not a file; give a library's path, auto or off.")
    if sys.platform != "linux":
        raise ConfigError("--blas: a library can be preloaded on Linux only; use auto or off.")
    # The loader splits LD_PRELOAD at both, without a way to quote them.
    if {" ", ":"} & set(str(path)):
        raise ConfigError(
            f"--blas: the path {path} holds a space or colon and cannot be preloaded."
        )
    return BlasChoice(path=str(path), reason="by configuration")


def _gpu_backend() -> str | None:
    for name in GPU_DISTRIBUTIONS:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return None


def _system_openblas() -> str | None:
    machine = platform.machine()
    for pattern in OPENBLAS_PATTERNS:
        # A link may outlive what it names: the loader would leave it out, and say nothing of use.
        found = sorted(path for path in glob.glob(pattern) if os.path.isfile(path))
        # Several architectures may be installed side by side; the folder names theirs.
        native = [path for path in found if machine in path]
        if native or found:
            return (native or found)[0]
    return None


def _mkl_wheel() -> str | None:
    found = sorted(each for each in Path(sys.prefix, "lib").glob("libmkl_rt.so*") if each.is_file())
    return str(found[-1]) if found else None
