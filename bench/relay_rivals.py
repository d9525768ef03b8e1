"""The processes of the relay's bench: source, relay, nginx, haproxy; started, measured, ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
from tests.free_port import free_port
from tests.waiting import wait_for

START_DEADLINE_S = 60.0
# Streams that a rival passes at once.
STREAMS_MAX = 64

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

HAPROXY_CONFIG = """
global
    nbthread 1
    maxconn 512
defaults
    mode http
    option http-no-delay
    option http-keep-alive
    http-reuse always
    timeout connect 5s
    timeout client 600s
    timeout server 600s
frontend clients
    bind 127.0.0.1:{port}
    default_backend engine
backend engine
    server engine unix@{engine}
"""


def find_program(name: str) -> str | None:
    """The program, also where only root's path has it."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Rival:
    """One process between client and source, or the source itself.

    Attributes:
        address: a port on loopback, or the path of a unix socket.
        pid: the one process that does the work.
    """

    def __init__(self, name: str, address: int | str, pid: int) -> None:
        self.name = name
        self.address = address
        self.pid = pid

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


class Child:
    """A process that listens on a port of loopback.

    Attributes:
        start_s: from spawn to listening.
    """

    def __init__(self, command: list[str], port: int, env: dict[str, str] | None = None) -> None:
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.pid = self._process.pid
        self.port = port
        wait_for(self._is_listening, START_DEADLINE_S, f"{command} listens")
        self.start_s = time.perf_counter() - began

    def _is_listening(self) -> bool:
        assert self._process.poll() is None, f"{self._process.args!r} has ended"
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except ConnectionRefusedError:
            return False
        return True

    def stop(self) -> None:
        """End the process, and what it started."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(START_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_daemon(folder: Path) -> Child:
    """The whole daemon, with a made-up engine."""
    model = folder / "m"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    port = free_port()
    flags = ["--port", str(port), "--run-dir", str(folder / "run")]
    # By itself it hands an engine no more than this many requests at once.
    flags += ["--decode-concurrency", str(STREAMS_MAX)]
    command = [sys.executable, "-m", "bench.relay_daemon", "serve", str(model), *flags]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_ISOLATE_", "XDG_"))}
    return Child(command, port, env | {"HOME": str(folder)})


def engine_of(port: int) -> tuple[str, int]:
    """Socket path and pid of a daemon's only engine, once it is ready."""

    def ready() -> tuple[str, int] | None:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/status", timeout=START_DEADLINE_S
        ) as answer:
            (model,) = json.load(answer)["models"]
        return (model["socket"], model["pid"]) if model["state"] == "ready" else None

    found = wait_for(ready, START_DEADLINE_S, "the engine is ready")
    assert found is not None
    return found


def start_nginx(folder: Path, engine: str) -> Child | None:
    """nginx in front of the same socket, None where it is not installed."""
    program = find_program("nginx")
    if program is None:
        return None
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(NGINX_CONFIG.format(folder=folder, engine=engine, port=port))
    return Child([program, "-p", str(folder), "-c", str(config)], port)


def start_haproxy(folder: Path, engine: str) -> Child | None:
    """haproxy in front of the same socket, None where it is not installed."""
    program = find_program("haproxy")
    if program is None:
        return None
    port = free_port()
    config = folder / "haproxy.cfg"
    config.write_text(HAPROXY_CONFIG.format(engine=engine, port=port))
    return Child([program, "-db", "-q", "-f", str(config)], port)
