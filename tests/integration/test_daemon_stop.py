"""How a daemon ends: drained, cut, restarted on the same port, and nothing left."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from mlx_isolate_supervisor.exit_codes import CUT_BASE, FAILED, OK
from tests.running_daemon import RunningDaemon, fake_model, read_all, read_until
from tests.waiting import wait_for


def assert_nothing_left(engines: list[psutil.Process], run_dir: Path) -> None:
    _, alive = psutil.wait_procs(engines, timeout=2)
    assert not alive
    assert not list(run_dir.glob("*.sock"))


def refuses(daemon: RunningDaemon) -> bool:
    try:
        socket.create_connection(("127.0.0.1", daemon.port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.case("19")
def test_it_restarts_on_the_same_port_with_connections_open(tmp_path: Path) -> None:
    """Five times, each within two seconds, keep-alive connections and all."""
    model = str(fake_model(tmp_path / "m"))
    port = 0
    held: list[socket.socket] = []
    try:
        for _ in range(5):
            with RunningDaemon(tmp_path / "home", model, port=port) as daemon:
                assert port in (0, daemon.port)
                port = daemon.port
                daemon.wait_state("ready")
                client = socket.create_connection(("127.0.0.1", port), timeout=10)
                held.append(client)
                client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                read_until(client, b"alive")
                engines = daemon.engines()
                began = time.monotonic()
                daemon.process.send_signal(signal.SIGTERM)
                assert daemon.wait_end(5) == OK
                assert time.monotonic() - began < 2.0
                assert_nothing_left(engines, daemon.run_dir)
    finally:
        for client in held:
            client.close()


@pytest.mark.case("20")
@pytest.mark.parametrize("to_group", [False, True], ids=["TERM", "INT-to-the-group"])
def test_a_first_signal_lets_streams_end(tmp_path: Path, to_group: bool) -> None:
    """Three streams, an idle connection and a queued request; each has its outcome."""
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model, "--decode-concurrency", "3") as daemon:
        daemon.wait_state("ready")
        idle = daemon.open_socket()
        streams = [daemon.stream(fake={"chunks": 20, "interval_s": 0.05}) for _ in range(3)]
        for stream in streams:
            read_until(stream, b"data:")
        queued = daemon.stream(fake={"chunks": 1})
        wait_for(lambda: daemon.status()["models"][0]["queued"] == 1, 5, "one waits")
        engines = daemon.engines()
        if to_group:
            os.killpg(daemon.process.pid, signal.SIGINT)
        else:
            daemon.process.send_signal(signal.SIGTERM)
        endings = [read_all(stream) for stream in streams]
        waited = read_all(queued)
        assert daemon.wait_end(10) == OK
        assert_nothing_left(engines, daemon.run_dir)
        assert read_all(idle) == b""
    for ending in endings:
        assert b"data: [DONE]" in ending
        assert b'"error"' not in ending
    assert b" 200 " in waited[:20] or b" 503 " in waited[:20], waited[:200]


def test_a_new_connection_is_refused_while_draining(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model) as daemon:
        daemon.wait_state("ready")
        stream = daemon.stream(fake={"chunks": 40, "interval_s": 0.05})
        read_until(stream, b"data:")
        daemon.process.send_signal(signal.SIGTERM)
        wait_for(lambda: refuses(daemon), 2, "new connections are refused")
        assert b"data: [DONE]" in read_all(stream)
        assert daemon.wait_end(10) == OK


@pytest.mark.case("20")
def test_a_second_signal_cuts(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model) as daemon:
        daemon.wait_state("ready")
        stream = daemon.stream(fake={"chunks": 100_000, "interval_s": 0.05})
        read_until(stream, b"data:")
        engines = daemon.engines()
        daemon.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "a second Ctrl-C cuts" in daemon.stdout, 5, "the first was heard")
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.wait_end(5) == CUT_BASE + signal.SIGINT
        assert time.monotonic() - began < 2.0
        ending = read_all(stream)
        assert_nothing_left(engines, daemon.run_dir)
    assert b'"code":"shutting_down"' in ending
    assert b"stopped while it worked on this request: the server is shutting down." in ending
    assert b"[DONE]" not in ending


def test_stop_now_cuts_one_that_a_first_stop_has_left_draining(tmp_path: Path) -> None:
    """It listens no more by then, so it is found by its run directory."""
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model) as daemon:
        daemon.wait_state("ready")
        stream = daemon.stream(fake={"chunks": 100_000, "interval_s": 0.05})
        read_until(stream, b"data:")
        place = {"MLX_ISOLATE_RUN_DIR": str(daemon.run_dir)}
        for _ in range(2):
            # A second plain stop waits as the first did; it cuts nothing.
            waited = daemon.command("stop", "--timeout", "0.1", **place)
            assert waited.returncode == FAILED
            assert waited.stderr.endswith("still runs; to cut what it runs: stop --now\n")
            wait_for(lambda: refuses(daemon), 2, "the first was heard")
        assert daemon.command("stop", "--now", **place).returncode == OK
        assert daemon.wait_end(5) == CUT_BASE + signal.SIGINT
        assert b"[DONE]" not in read_all(stream)


@pytest.mark.case("20")
def test_what_outlasts_the_shutdown_timeout_is_cut_with_an_error(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    # Three seconds instead of sixty: the test waits for all of it.
    with RunningDaemon(tmp_path / "home", model, "--shutdown-timeout", "3") as daemon:
        daemon.wait_state("ready")
        stream = daemon.stream(fake={"chunks": 100_000, "interval_s": 0.05})
        read_until(stream, b"data:")
        engines = daemon.engines()
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        ending = read_all(stream)
        assert daemon.wait_end(10) == OK
        assert time.monotonic() - began < 5.0
        assert_nothing_left(engines, daemon.run_dir)
    assert b'"code":"shutting_down"' in ending
    assert b"[DONE]" not in ending


@pytest.mark.case("20")
@pytest.mark.parametrize("signals", [1, 2])
def test_a_frozen_engine_does_not_hold_up_the_end(tmp_path: Path, signals: int) -> None:
    model = str(fake_model(tmp_path / "m"))
    # Three seconds instead of sixty: the test with one signal waits for all of it.
    with RunningDaemon(tmp_path / "home", model, "--shutdown-timeout", "3") as daemon:
        pid = daemon.wait_state("ready")["pid"]
        in_prefill = daemon.stream(fake={"prefill_s": 600.0})
        stream = daemon.stream(fake={"chunks": 100_000, "interval_s": 0.05})
        read_until(stream, b"data:")
        wait_for(lambda: daemon.status()["models"][0]["active"] == 2, 5, "both are with the engine")
        engines = daemon.engines()
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        if signals == 2:
            wait_for(lambda: "a second Ctrl-C cuts" in daemon.stdout, 5, "the first was heard")
            daemon.process.send_signal(signal.SIGINT)
        assert daemon.wait_end(10) == (OK if signals == 1 else CUT_BASE + signal.SIGINT)
        assert time.monotonic() - began < (5.0 if signals == 1 else 2.0)
        assert_nothing_left(engines, daemon.run_dir)
        for client in (stream, in_prefill):
            ending = read_all(client)
            assert b'"error"' in ending
            assert b"[DONE]" not in ending


def test_a_stop_during_the_load_leaves_nothing(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m", hang_load=True))
    with RunningDaemon(tmp_path / "home", model) as daemon:
        daemon.wait_state("starting")
        engines = daemon.engines()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait_end(10) == OK
        assert_nothing_left(engines, daemon.run_dir)


def test_a_follower_of_the_log_does_not_hold_up_the_end(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model) as daemon:
        daemon.wait_state("ready")
        for path in (b"/logs/stream", b"/events"):
            follower = daemon.open_socket()
            follower.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
            read_until(follower, b"\r\n\r\n")
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait_end(5) == OK
        assert time.monotonic() - began < 1.5


@pytest.mark.case("19")
def test_stale_files_in_the_run_directory_do_not_matter(tmp_path: Path) -> None:
    """A pid file naming a live unrelated process; it is never signalled."""
    model = str(fake_model(tmp_path / "m"))
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        with RunningDaemon(tmp_path / "home", model) as daemon:
            daemon.wait_state("ready")
            run_dir = daemon.run_dir
            kept = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
            daemon.process.kill()
            daemon.process.wait()
            run_dir.mkdir(exist_ok=True)
            for name, content in kept.items():
                old = str(daemon.process.pid).encode()
                (run_dir / name).write_bytes(content.replace(old, str(bystander.pid).encode()))
            (run_dir / "garbage.json").write_text("{")
            with RunningDaemon(tmp_path / "home", model, run_dir=run_dir) as second:
                second.wait_state("ready")
                assert second.chat().status == 200
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_stop_ends_a_daemon_and_says_so(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model) as daemon:
        daemon.wait_state("ready")
        pid = daemon.process.pid
        outcome = daemon.command("stop")
        assert (outcome.returncode, outcome.stdout) == (OK, f"stopped (pid {pid})\n")
        assert daemon.wait_end(5) == OK
