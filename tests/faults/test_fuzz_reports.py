"""Engines that lie at random on their report pipes: the daemon goes on, and its pages hold."""

import json
import random
from pathlib import Path

import pytest

from tests.material.report_lines import random_report
from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for

PAGES = ("/livez", "/health", "/status", "/metrics", "/v1/models", "/running", "/logs", "/ui")
SETTLE_S = 30.0


def lying_models(folder: Path, seed: int, engines: int, lines: int) -> list[str]:
    """Models whose first engine says `lines` random lines before it is ready, and more after."""
    chance = random.Random(seed)
    models: list[str] = []
    for number in range(engines):
        folder.mkdir(parents=True, exist_ok=True)
        before, after = folder / f"before{number}", folder / f"after{number}"
        before.write_bytes(random_report(chance, lines))
        after.write_bytes(random_report(chance, lines))
        models.append(
            str(
                fake_model(
                    folder / f"m{number}",
                    until_incarnation=1,
                    report_before=str(before),
                    report_after=str(after),
                )
            )
        )
    return models


def fuzz(folder: Path, seed: int, engines: int, lines: int) -> None:
    models = lying_models(folder, seed, engines, lines)
    with RunningDaemon(folder / "home", *models) as daemon:
        reader = daemon.open_socket()
        reader.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")

        def served() -> bool:
            states = [model["state"] for model in daemon.status()["models"]]
            return states == ["ready"] * engines

        wait_for(served, SETTLE_S, f"every model serves in the end (seed {seed})")
        for model in daemon.status()["models"]:
            assert daemon.chat(model["id"]).status == 200, (seed, model)

        def told() -> bool:
            said = [model["progress"] or {} for model in daemon.status()["models"]]
            return all(one.get("completed", 0) >= 1 for one in said)

        # True lines, which came behind all the lies.
        wait_for(told, SETTLE_S, f"every engine is heard again (seed {seed})")
        for page in PAGES:
            answer = daemon.ask("GET", page)
            assert answer.status == 200, (seed, page, answer.body[:300])
            assert b"\x1b" not in answer.body
            assert len(answer.body) < 4 << 20
        text = daemon.ask("GET", "/status").body.decode()
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        for command in ("status", "ps"):
            shown = daemon.command(command)
            assert shown.returncode == 0, (seed, shown.stderr)
        assert "Traceback" not in daemon.stderr, (seed, daemon.stderr[-3000:])


def test_a_thousand_random_lines_of_four_engines_harm_nobody(tmp_path: Path) -> None:
    fuzz(tmp_path, seed=5, engines=4, lines=125)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_100000_random_lines_harm_nobody(tmp_path: Path) -> None:
    for number in range(20):
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed {seed}")
        fuzz(tmp_path / str(number), seed, engines=5, lines=500)
