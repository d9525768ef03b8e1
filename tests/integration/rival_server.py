"""mlx-lm's own server on a tiny model, as the oracle of what a request should answer."""

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.free_port import free_port
from tests.waiting import wait_for

START_DEADLINE_S = 90.0
ANSWER_DEADLINE_S = 60.0


class Rival:
    """A running mlx_lm.server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Its answer, parsed."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_DEADLINE_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, answer
        return answer


@contextmanager
def rival_server(folder: Path, home: Path) -> Generator[Rival]:
    """mlx_lm.server for the time of the block; it writes only under `home`."""
    port = free_port()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "HOME": str(home)}
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(folder), "--port", str(port)]
    with (home / "rival.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=home)
    try:
        rival = Rival(port)
        wait_for(lambda: process.poll() is not None or rival.is_up(), START_DEADLINE_S, "a rival")
        assert process.poll() is None, (home / "rival.log").read_text()
        yield rival
    finally:
        process.kill()
        process.wait()
