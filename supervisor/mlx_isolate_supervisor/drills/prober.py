"""Asks /livez all the time from a thread of its own, and keeps the slowest answer.

A thread, so that what the drill itself does on its loop is not measured.
"""

import http.client
import threading
import time
from urllib.parse import urlsplit

from mlx_isolate_supervisor.drills.record import reason_of

# Between an answer and the next question.
INTERVAL_S = 0.02
# An answer that takes longer than this counts as none.
TIMEOUT_S = 10.0


class Prober:
    """Probes one daemon from `start` to `stop`.

    Args:
        url: the daemon's address.

    Attributes:
        count: answers so far.
        worst_s: the slowest of them; one that failed counts with the time it took, at least
            TIMEOUT_S.
        failure: why the last failed one failed.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path.rstrip("/") + "/livez"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.count = 0
        self.worst_s = 0.0
        self.failure: str | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, after the answer that is awaited."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(TIMEOUT_S + 1)
            self._thread = None

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                connection.request("GET", self._path)
                answer = connection.getresponse()
                answer.read()
                took = time.monotonic() - began
                if answer.status != 200:
                    self.failure, took = f"status {answer.status}", max(took, TIMEOUT_S)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self.failure = reason_of(error)
                took = max(time.monotonic() - began, TIMEOUT_S)
            self.count += 1
            self.worst_s = max(self.worst_s, took)
            self._stop.wait(INTERVAL_S)
        connection.close()
