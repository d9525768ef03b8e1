"""Reloads, commands and requests all at once: nothing that anybody asked for cuts a request."""

import json
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.running_daemon import RunningDaemon, fake_model, read_all, read_until
from tests.waiting import wait_for

STORM_S = 6.0
COMMANDS = ("load", "unload", "reload", "reset")


def write(file: Path, models: dict[str, dict[str, Any]], **content: Any) -> None:
    """Put a configuration in place in one step."""
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps({"models": models, **content}))
    temporary.replace(file)


class Storm:
    """Threads that each do one thing again and again until it is over.

    Attributes:
        failures: what must not have happened, in words.
        answers: requests that were answered to their end.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failures: list[str] = []
        self.answers = 0

    def add(self, act: Callable[[random.Random], str | None], pause_s: float) -> None:
        """Do `act` in a thread of its own; a text that it returns is a failure."""
        number = len(self._threads)
        rng = random.Random(self._seed * 1000 + number)

        def run() -> None:
            while not self._over.wait(rng.uniform(0, 2 * pause_s)):
                try:
                    fault = act(rng)
                except Exception as error:  # noqa: BLE001 - the top frame of the thread
                    fault = f"{act.__name__}: {error!r}"
                if fault:
                    self.failures.append(fault)

        self._threads.append(threading.Thread(target=run))

    def blow(self, seconds: float) -> None:
        for thread in self._threads:
            thread.start()
        time.sleep(seconds)
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request or command has no outcome"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.case("30")
def test_reloads_and_commands_of_many_at_once_cut_no_request(
    tmp_path: Path, seed: int, limit: int
) -> None:
    file = tmp_path / "config.yaml"
    paths = {name: str(fake_model(tmp_path / name, load_s=0.05)) for name in ("one", "two")}
    models: dict[str, dict[str, Any]] = {name: {"path": path} for name, path in paths.items()}
    write(file, models)
    flags = ("--config", str(file), "--models-max", str(limit))
    with RunningDaemon(tmp_path / "home", *flags, standby=1) as daemon:
        storm = Storm(seed)

        def hang_up(rng: random.Random) -> None:
            changed: dict[str, Any] = rng.choice(
                [{"temp": rng.random()}, {"aliases": ["uno"]}, {"ttl": 30}, {}]
            )
            write(file, {"one": models["one"], "two": models["two"] | changed})
            for _ in range(rng.randint(1, 3)):
                daemon.process.send_signal(signal.SIGHUP)

        def command(rng: random.Random) -> str | None:
            name = rng.choice(COMMANDS)
            answer = daemon.ask("POST", f"/models/{name}", {"model": rng.choice(("one", "two"))})
            # An unload may end what a load waits for, and a reload what another one began.
            return None if answer.status in (200, 503) else f"{name}: {answer.status}"

        def chat(rng: random.Random) -> str | None:
            fake = {"chunks": rng.randint(1, 20), "interval_s": 0.01}
            text = read_all(daemon.stream(model=rng.choice(("one", "two")), fake=fake))
            storm.answers += 1
            return None if text.rstrip().endswith(b"0") and b"[DONE]" in text else repr(text[-300:])

        storm.add(hang_up, 0.05)
        for _ in range(3):
            storm.add(command, 0.1)
        for _ in range(4):
            storm.add(chat, 0.05)
        storm.blow(STORM_S)
        assert not storm.failures, storm.failures[:5]
        assert storm.answers >= 10
        for name in ("one", "two"):
            assert daemon.chat(name).status == 200
        told = daemon.stderr + daemon.stdout
        assert "message_failed" not in told and "config.failed" not in told
        wait_for(lambda: _is_at_rest(daemon), 30, "all engines but those that serve are gone")


def _is_at_rest(daemon: RunningDaemon) -> bool:
    status = daemon.status()
    serving = [model for model in status["models"] if model["pid"] is not None]
    known = {model["pid"] for model in serving}
    known |= {spare["pid"] for spare in status["supervisor"]["standbys"]}
    sockets = len(list(daemon.run_dir.glob("*.sock")))
    return {engine.pid for engine in daemon.engines()} == known and sockets == len(serving)


def reload(daemon: RunningDaemon, file: Path, models: dict[str, dict[str, Any]]) -> None:
    told = daemon.stdout.count("configuration was reloaded")
    write(file, models)
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: daemon.stdout.count("configuration was reloaded") > told, 10, "a reload")


def test_a_model_that_is_added_again_while_its_engine_still_drains_is_served_by_another(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.yaml"
    one, two = ({"path": str(fake_model(tmp_path / name))} for name in ("one", "two"))
    write(file, {"one": one, "two": two})
    with RunningDaemon(tmp_path / "home", "--config", str(file)) as daemon:
        stream = daemon.stream(model="two", fake={"chunks": 200, "interval_s": 0.02})
        read_until(stream, b"data:")
        for models in ({"one": one}, {"one": one, "two": two}) * 3:
            reload(daemon, file, models)
            assert daemon.chat("two").status == (200 if "two" in models else 404)
        read_until(stream, b"data: [DONE]")
        assert daemon.chat("two").status == 200
        wait_for(lambda: _is_at_rest(daemon), 20, "the removed engines are gone")
        assert "message_failed" not in daemon.stderr


@pytest.mark.case("15")
def test_a_request_that_meets_the_end_of_an_idle_time_is_served(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    write(file, {"m": {"path": str(fake_model(tmp_path / "m")), "ttl": 0.05}})
    with RunningDaemon(tmp_path / "home", "--config", str(file), standby=1) as daemon:
        storm = Storm(3)

        def chat(_: random.Random) -> str | None:
            answer = daemon.chat("m", fake={"chunks": 1})
            return None if answer.status == 200 else f"{answer.status} {answer.body!r}"

        for _ in range(3):
            storm.add(chat, 0.06)
        storm.blow(STORM_S)
        assert not storm.failures, storm.failures[:5]
        daemon.wait_state("stopped")
        assert daemon.status()["models"][0]["incarnation"] > 3


ODD_TIMES: list[Any] = [
    "-1", "0", "5m", " 5M ", "1e3", "nan", "inf", "-inf", "-", "", "0x10", "١", "9" * 400, "1ms",
    -1, -0.0, 0, 1e308, -1e308, 10**30, 10**400, 5e-324, True, None, [], {}, "5 m", "5m5s",
]  # fmt: skip


def test_whatever_a_keep_alive_holds_is_a_time_or_a_400(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        for value in ODD_TIMES:
            for name in ("keep_alive", "ttl"):
                fields: dict[str, Any] = {name: value}
                answer = daemon.chat(None, **fields)
                assert answer.status in (200, 400), (name, value, answer.body)
                if answer.status == 400:
                    assert answer.json()["error"]["param"] == name, (name, value)
                # Whatever it was taken for can be shown.
                assert daemon.get("/status")["models"][0]["id"] == "m"
                assert daemon.get("/running")["running"] is not None
        daemon.chat(keep_alive=1e308)
        daemon.wait_state("ready")
        assert daemon.command("status").returncode == daemon.command("ps").returncode == 0
        assert daemon.chat(keep_alive="-1").status == 200
        assert "message_failed" not in daemon.stderr
