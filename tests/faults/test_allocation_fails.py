"""An engine that gets no more memory from the system: an error and another engine, no silence."""

import sys
from pathlib import Path

import psutil
import pytest

from mlx_isolate_supervisor.engines.blas import choose_blas
from tests.running_daemon import REAL, RunningDaemon

READY_DEADLINE_S = 90.0

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit (Linux)"),
    # With the reference BLAS (and so on a machine with a GPU's wheel) prompts run in steps so
    # small that the memory there is does for all of them, slowly.
    pytest.mark.skipif(choose_blas("auto").path is None, reason="needs steps that need memory"),
]


def forbid_more_memory(pid: int) -> None:
    """Let every further mapping of address space fail, so that a step's arrays find no room."""
    process = psutil.Process(pid)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, psutil.RLIM_INFINITY))


@pytest.mark.case("14")
def test_an_allocation_that_fails_is_told_and_costs_one_engine(
    slow_model: Path, tmp_path: Path
) -> None:
    """Native code ends the process; the request that caused it is not sent again."""
    with RunningDaemon(
        tmp_path, str(slow_model), "--served-model-name", "m", program=REAL
    ) as daemon:
        before = daemon.wait_state("ready", deadline_s=READY_DEADLINE_S)
        # Threads and buffers of a small request are there already.
        assert daemon.chat("m", max_tokens=2).status == 200
        forbid_more_memory(before["pid"])
        # Within the client's 30 s.
        answer = daemon.chat("m", messages=[{"role": "user", "content": "x" * 6000}])
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (502, "engine_died")
        assert answer.headers["Retry-After"]
        assert "Traceback" not in error["message"]
        assert daemon.chat("m", max_tokens=2).status == 200
        after = daemon.wait_state("ready")
        assert after["incarnation"] == before["incarnation"] + 1
        exit = after["last_exit"]
        assert (exit["signal"] or f"code {exit['code']}") in error["message"]
        assert exit["stderr_tail"]
