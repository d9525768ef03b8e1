"""Runs a daemon for an hour under mixed traffic while its engines die in every way.

`python -m bench.soak [--minutes N] [--seed N] [--json FILE]`. Three tiny models of random weights
(full attention, a sliding window, a parrot that calls tools) run on real engines with both tiers of
the prompt cache; clients ask, leave, stall and send nonsense, engines are killed, stopped, made to
exit and robbed of memory, and the configuration is reloaded. Held to: the supervisor lives, every
client has an outcome, no greedy answer differs from what mlx-lm says cold, and the supervisor's
memory, descriptors and disk do not grow. A seed fixes what is done and when; what the machine makes
of it is its own. It says nothing of speed.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from tests.running_daemon import RunningDaemon

from bench.leaving import leaving_nothing
from bench.soak_acts import Acts
from bench.soak_clients import Clients
from bench.soak_models import build_models, cold_answers, write_config
from bench.soak_plan import MODELS, Act, Plan, Reload, Request, make_plan, prompt_texts
from bench.soak_record import Record, faults, lines
from bench.soak_watch import Watch

DAEMON = (sys.executable, "-m", "bench.soak_daemon")
READY_DEADLINE_S = 180.0
SETTLE_DEADLINE_S = 120.0
# Small, so that the tier is full within minutes and evicts from then on.
SSD_GB = "0.02"
TELL_EVERY_S = 60.0


class Soak:
    """One soak in a folder of its own: entered, played in one part or several, and finished.

    Between parts the daemon is at rest and the plan's clock stands.

    Args:
        plan: what is to happen.
        home: an empty folder.
    """

    def __init__(self, plan: Plan, home: Path) -> None:
        self._plan = plan
        self._home = home
        self._prompts = {model: prompt_texts(plan.seed, model) for model in MODELS}
        self._start = 0.0
        self._endings: list[str] = []

    def __enter__(self) -> Self:
        """Build the models, ask them cold, start the daemon."""
        folders = build_models(self._home / "models")
        expected = cold_answers(folders, self._prompts)
        config, ssd = self._home / "config.yaml", self._home / "ssd"
        write_config(config, folders)
        flags = ["--config", str(config), "--ssd-cache-dir", str(ssd), "--ssd-cache-max-gb", SSD_GB]
        self._daemon = RunningDaemon(self._home / "home", *flags, program=DAEMON, standby=1)
        self._daemon.__enter__()
        try:
            for index in range(len(MODELS)):
                self._daemon.wait_state("ready", index, READY_DEADLINE_S)
            self._clients = Clients(self._daemon.port, self._prompts, expected, self._now)
            self._acts = Acts(self._daemon, config, folders, self._now)
            self._watch = Watch(self._daemon, ssd, self._now)
        except BaseException:
            self._daemon.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is left, whatever happened."""
        self._daemon.__exit__(kind, error, trace)

    def play(self, from_s: float, until_s: float) -> None:
        """This part of the plan, until its last client has ended and the daemon is at rest."""
        due: list[Request | Act | Reload] = [
            *self._plan.requests,
            *self._plan.acts,
            *self._plan.reloads,
        ]
        part = sorted(
            (one for one in due if from_s <= one.at_s < until_s), key=lambda one: one.at_s
        )
        self._start = time.monotonic() - from_s
        asyncio.run(self._play(part))
        self._endings += self._watch.unsettled(SETTLE_DEADLINE_S)

    def finish(self) -> Record:
        """Stop the daemon as a service manager does; everything that was seen."""
        status = self._daemon.status()
        restarts = {model["id"]: model["restarts"] for model in status["models"]}
        self._daemon.process.send_signal(signal.SIGTERM)
        code = self._daemon.process.wait(SETTLE_DEADLINE_S)
        return Record(
            plan=self._plan,
            outcomes=tuple(self._clients.outcomes),
            done=tuple(self._acts.done),
            samples=tuple(self._watch.samples),
            restarts=restarts,
            endings=(*self._endings, *self._watch.left_behind(code)),
        )

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def _play(self, part: Sequence[Request | Act | Reload]) -> None:
        watching = asyncio.create_task(self._watch.run())
        told_s = self._now()
        async with asyncio.TaskGroup() as running:
            for one in part:
                await asyncio.sleep(max(0.0, one.at_s - self._now()))
                match one:
                    case Request():
                        running.create_task(self._clients.run(one))
                    case Act():
                        running.create_task(self._acts.kill(one))
                    case Reload():
                        running.create_task(self._acts.reload(one))
                if one.at_s - told_s >= TELL_EVERY_S:
                    told_s = one.at_s
                    outcomes = len(self._clients.outcomes)
                    print(f"{told_s:7.0f} s: {outcomes} outcomes, {self._watch.line()}", flush=True)
        watching.cancel()
        # Whatever ended it before that is raised: an hour without samples proves nothing.
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def soak(plan: Plan) -> Record:
    """Run `plan` in a temporary folder, which is removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="mi-soak") as folder,
        Soak(plan, Path(folder)) as running,
    ):
        running.play(0.0, plan.duration_s)
        return running.finish()


def main() -> int:
    """Run, print the record, and fail if a promise was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(2**32),
        help="fixes what is done and when (default: a random one, which is printed)",
    )
    parser.add_argument(
        "--request-every",
        type=float,
        default=0.7,
        help="mean seconds between requests (default 0.7)",
    )
    parser.add_argument(
        "--kill-every", type=float, default=20.0, help="mean seconds between deaths (default 20)"
    )
    parser.add_argument(
        "--reload-every", type=float, default=60.0, help="mean seconds between reloads (default 60)"
    )
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    plan = make_plan(
        given.seed,
        given.minutes * 60.0,
        given.request_every,
        given.kill_every,
        given.reload_every,
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "aiohttp"))
    print(f"seed {plan.seed}, plan {plan.digest}, Python {sys.version.split()[0]}, {versions}")
    record = soak(plan)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.encode(record))
    print("\n".join(lines(record)))
    broken = faults(record)
    print("\n".join(["broken promises:", *broken]) if broken else "every promise was kept")
    return 1 if broken else 0


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main())
