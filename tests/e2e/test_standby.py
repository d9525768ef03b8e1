"""A daemon as users start it: its default standby takes over from a killed engine."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlx_isolate_supervisor.engines.memory import available_bytes
from mlx_isolate_supervisor.engines.standby import FREE_BYTES_MIN
from tests.running_daemon import REAL, RunningDaemon
from tests.waiting import wait_for

DEADLINE_S = 120.0
# Near the limit the daemon's look and this test's could differ.
MARGIN_BYTES = 1_000_000_000


@pytest.mark.timeout(300)
def test_by_default_a_killed_engine_is_followed_by_the_standby(
    parrot_model: Path, tmp_path: Path
) -> None:
    if (available_bytes() or 0) < FREE_BYTES_MIN + MARGIN_BYTES:
        pytest.skip("less than 9 GB of memory are free: by default there is no standby")
    with RunningDaemon(tmp_path, str(parrot_model), program=REAL, standby=None) as daemon:
        before = daemon.wait_state("ready", deadline_s=DEADLINE_S)

        def prepared() -> dict[str, Any] | None:
            spares = daemon.status()["supervisor"]["standbys"]
            return spares[0] if spares and spares[0]["is_prepared"] else None

        spare = wait_for(prepared, DEADLINE_S, "a standby is prepared")
        assert spare is not None and spare["model"] == before["id"]
        os.kill(before["pid"], signal.SIGKILL)
        wait_for(lambda: daemon.status()["models"][0]["incarnation"] == 2, DEADLINE_S, "a respawn")
        assert daemon.wait_state("ready", deadline_s=DEADLINE_S)["pid"] == spare["pid"]
        assert daemon.chat(max_tokens=4).status == 200
        if sys.platform == "linux":
            shown = " ".join(psutil.Process(spare["pid"]).cmdline())
            assert f"--id {before['id']} --incarnation 2" in shown
