"""The processes of the relay's bench: source, relay and nginx, started, measured and ended."""

import os
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

START_DEADLINE_S = 20.0

NGINX_CONFIG = """
daemon off;
master_process off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 64m;
    keepalive_requests 1000000;
    upstream engine {{ server unix:{engine}; keepalive 32; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


def find_nginx() -> str | None:
    """The nginx program, also where only root's path has it."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Rival:
    """One process between client and source, or the source itself.

    Attributes:
        address: a port on loopback, or the path of a unix socket.
        start_s: from spawn to listening.
    """

    def __init__(self, name: str, address: int | str, command: list[str]) -> None:
        self.name = name
        self.address = address
        began = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._wait_listening()
        self.start_s = time.perf_counter() - began

    @property
    def pid(self) -> int:
        """The one process that does the work."""
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system time so far; from schedstat, which counts in nanoseconds."""
        total = 0
        try:
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            times = psutil.Process(self.pid).cpu_times()
            return times.user + times.system
        return total / 1e9

    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _wait_listening(self) -> None:
        end = time.monotonic() + START_DEADLINE_S
        if isinstance(self.address, str):
            assert self._process.stdout is not None
            ready, _, _ = select.select([self._process.stdout], [], [], START_DEADLINE_S)
            assert ready, f"{self.name} does not listen"
            return
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.address), timeout=1).close()
                return
            except ConnectionRefusedError:
                assert self._process.poll() is None, f"{self.name} has ended"
                assert time.monotonic() < end, f"{self.name} does not listen"
                time.sleep(0.002)


def start_source(folder: Path) -> Rival:
    """The made-up engine."""
    path = str(folder / "engine.sock")
    return Rival("direct", path, [sys.executable, "-m", "bench.relay_source", path])


def start_relay(engine: str) -> Rival:
    """The relay-only application."""
    port = free_port()
    return Rival("relay", port, [sys.executable, "-m", "bench.relay_server", engine, str(port)])


def start_nginx(folder: Path, engine: str) -> Rival | None:
    """nginx in front of the same socket, None where it is not installed."""
    program = find_nginx()
    if program is None:
        return None
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(NGINX_CONFIG.format(folder=folder, engine=engine, port=port))
    return Rival("nginx", port, [program, "-p", str(folder), "-c", str(config)])
