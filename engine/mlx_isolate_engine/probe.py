"""`python -P -m mlx_isolate_engine.probe [FOLDER…]`: what computes here, and can it serve them.

A process of its own, since the supervisor's code never loads mlx; a crash of it is an answer too.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from mlx_isolate_engine.device import backend_name
from mlx_isolate_engine.model.architecture import check_architecture
from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.model.facts import loaded_blas
from mlx_isolate_engine.model.folder import check_folder
from mlx_isolate_shared.probe import FolderFinding, ProbeAnswer

# Large enough to tell a fast BLAS from a slow one, small enough for the slow one.
MATRIX_SIZE = 512
TRIES = 3


def main(argv: Sequence[str]) -> int:
    """Print the answer; the exit status.

    Args:
        argv: model folders, and `--trust FOLDER` for each of them whose own code may run.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--trust", action="append", default=[])
    asked = parser.parse_args(argv)
    backend = backend_name()
    # Measured before the question which BLAS: a library may be loaded on first use.
    gflops = matrix_gflops()
    answer = ProbeAnswer(
        backend=backend,
        blas=loaded_blas() if backend == "cpu" else None,
        gflops=gflops,
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        folders=tuple(
            look_at(folder, is_trusted=folder in asked.trust) for folder in asked.folders
        ),
    )
    print(msgspec.json.encode(answer).decode())
    return 0


def matrix_gflops() -> float:
    """The best of a few float32 products, in 1e9 operations a second."""
    import mlx.core as mx

    matrix = mx.random.normal((MATRIX_SIZE, MATRIX_SIZE))
    mx.eval(matrix)
    best_s = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        mx.eval(matrix @ matrix)
        best_s = min(best_s, time.perf_counter() - began)
    return 2 * MATRIX_SIZE**3 / best_s / 1e9


def look_at(folder: str, *, is_trusted: bool = False) -> FolderFinding:
    """Whether a folder looks whole, and like something that mlx-lm can build.

    Args:
        is_trusted: whether code of its own may run; here none does.
    """
    try:
        files = check_folder(Path(folder))
        check_architecture(files, trust_remote_code=is_trusted)
    except ModelError as error:
        return FolderFinding(folder=folder, error=error.message)
    named = files.config.get("torch_dtype") or files.config.get("dtype")
    quantized = files.config.get("quantization")
    dtype = "quantized" if isinstance(quantized, dict) else named
    return FolderFinding(
        folder=folder,
        weights_bytes=files.weights_bytes,
        dtype=dtype if isinstance(dtype, str) else None,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
