"""What computes here, asked of a child process that loads mlx: backend, BLAS, model folders."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from mlx_isolate_shared.probe import FolderFinding, ProbeAnswer
from mlx_isolate_supervisor.doctor.findings import Finding, doubt, fault, ok
from mlx_isolate_supervisor.engines.blas import choose_blas
from mlx_isolate_supervisor.settings.quantities import show_bytes

PROBE = (sys.executable, "-P", "-m", "mlx_isolate_engine.probe")
# Imports from a cold disk, and on a GPU its first kernel.
DEADLINE_S = 120.0
# Far below any optimized BLAS, far above the reference one.
GFLOPS_MIN = 8.0
_BLAS_REMEDY = "install libopenblas0-pthread (Debian), or pip install 'mlx-isolate[mkl]'"
_REINSTALL = (
    "install it again: pip install --force-reinstall 'mlx[cpu]', for an NVIDIA GPU 'mlx[cuda13]' or "
    "'mlx[cuda12]', on macOS mlx"
)


def ask_probe(
    folders: Sequence[str],
    blas: str,
    *,
    trusted: Sequence[str] = (),
    program: Sequence[str] = PROBE,
    deadline_s: float = DEADLINE_S,
) -> ProbeAnswer | Finding:
    """The probe's answer, or what is wrong with it.

    Args:
        folders: model folders to look at.
        blas: the setting of that name.
        trusted: those of them whose own code may run.
        program: what is run.
        deadline_s: how long it may take.
    """
    added = choose_blas(blas).environment(os.environ.get("LD_PRELOAD"))
    try:
        done = subprocess.run(
            [*program, *folders, *(f"--trust={folder}" for folder in trusted)],
            env={**os.environ, **added},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return fault("backend", f"MLX does not compute within {deadline_s:g} s.", _REINSTALL)
    if done.returncode != 0:
        return fault("backend", f"MLX cannot be used: {_why(done)}.", _REINSTALL)
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=ProbeAnswer)
    except (msgspec.DecodeError, IndexError):
        return fault("backend", "MLX's probe did not answer.", _REINSTALL)


def _why(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        try:
            return f"it was killed by {signal.Signals(-done.returncode).name}"
        except ValueError:
            return f"it was killed by signal {-done.returncode}"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return said[-1].rstrip(".") if said else f"it exited with code {done.returncode}"


def judge_backend(answer: ProbeAnswer) -> Iterator[Finding]:
    """Backend and BLAS."""
    versions = ", ".join(f"{name} {number}" for name, number in sorted(answer.versions.items()))
    yield ok("backend", f"{answer.backend}; {versions}.")
    if answer.backend != "cpu":
        return
    what = answer.blas or "the BLAS, whose name is not known,"
    text = f"{what} multiplies at {answer.gflops:.1f} GFLOP/s."
    if answer.gflops < GFLOPS_MIN:
        yield doubt("blas", f"{text} Prompts will be slow.", _BLAS_REMEDY)
    else:
        yield ok("blas", text)


def judge_folder(answer: ProbeAnswer, found: FolderFinding) -> Finding:
    """One model folder."""
    name = Path(found.folder).name
    if found.error is not None:
        return fault(
            "model", found.error, "get the model anew, mend what it says, or name another one"
        )
    if answer.backend == "cpu" and found.dtype not in (None, "float32"):
        return doubt(
            "model",
            f"{name} is whole, but {found.dtype} is tens of times slower than float32 on a CPU.",
            "convert it to float32: mlx_lm.convert --dtype float32",
        )
    return ok("model", f"{name} is whole, {show_bytes(found.weights_bytes)} of weights.")
