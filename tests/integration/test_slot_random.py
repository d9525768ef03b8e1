"""A slot under random commands, requests and faults keeps its promises.

The seed is printed; `MLX_ISOLATE_TEST_SEED=N` repeats a run's choices, and
`MLX_ISOLATE_TEST_STEPS=N` makes it longer.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mlx_isolate_shared.errors import HttpError
from mlx_isolate_supervisor.config import MemoryPolicy
from mlx_isolate_supervisor.slots.lifecycle import Event, State, step
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.telemetry.status import Transition
from tests.pool_rig import QUICK_RESTART, PoolRig, pool_rig, run
from tests.waiting import wait_until

# Short limits, so that hangs and refusals are passed through many times in a short test.
SETTINGS = SlotSettings(
    queue_timeout_s=8.0,
    queued_requests_max=8,
    start_silence_s=3.0,
    drain_timeout_s=0.5,
    stop_window_s=0.5,
    abort_window_s=0.2,
    watchdog_timeout_s=2.0,
    report_silence_s=2.0,
    stall_timeout_s=1.0,
    watchdog_interval_s=0.1,
    restart=QUICK_RESTART,
)
SIGNALS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGSTOP]
START_FAULTS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"load_s": 0.2},
    {"die": "exit:1"},
    {"die": "exit:78", "failed": ["broken", "it is broken"]},
    {"die": "SIGKILL", "die_after_ready_s": 0.1},
    {"ignore_term": True},
    {"term_s": 0.2},
    {"no_socket": True},
    {"lies": ["garbage", "double_ready"]},
]
REQUESTS: list[dict[str, Any]] = [
    {"chunks": 1},
    {"chunks": 3, "interval_s": 0.02},
    {"prefill_s": 0.1},
    {"die": "SIGKILL", "after": 1},
    {"die": "exit:0"},
    {"close": True, "after": 0},
    {"status": 400},
]


class Walk:
    """Random acts on one slot, with the outcome of every request."""

    def __init__(self, rig: PoolRig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.requests: list[asyncio.Task[str]] = []
        self.commands: list[asyncio.Task[None]] = []
        self.acts: list[tuple[float, Callable[[], None]]] = [
            (8, self.ask),
            (2, self.leave),
            (3, self.signal),
            (2, self.change_faults),
            (1, self.unload),
            (1, self.reload),
            (1, self.reset),
        ]

    def act(self) -> None:
        weights = [weight for weight, _ in self.acts]
        self.rng.choices(self.acts, weights)[0][1]()

    def ask(self) -> None:
        self.requests.append(asyncio.create_task(self._outcome(self.rng.choice(REQUESTS))))

    async def _outcome(self, fake: dict[str, Any]) -> str:
        try:
            return f"answered {(await self.rig.complete(**fake)).status}"
        except HttpError as error:
            return f"refused {error.status} {error.code}"

    def leave(self) -> None:
        pending = [task for task in self.requests if not task.done()]
        if pending:
            self.rng.choice(pending).cancel()

    def signal(self) -> None:
        number = self.rng.choice(SIGNALS)
        if (pid := self.rig.status().pid) is not None:
            # It may have been reaped in this very moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def change_faults(self) -> None:
        self.rig.set_faults("m", **self.rng.choice(START_FAULTS))

    def unload(self) -> None:
        self.commands.append(asyncio.create_task(self.rig.pool.unload("m")))

    def reload(self) -> None:
        self.commands.append(asyncio.create_task(self.rig.pool.reload("m")))

    def reset(self) -> None:
        self.rig.pool.reset("m")


def check_table(transitions: list[Transition]) -> None:
    """Every transition is a cell of the table, and each begins where the last ended."""
    state = State.STOPPED
    for moved in transitions:
        cell = step(State(moved.before), Event(moved.event))
        assert cell is not None and cell.state.value == moved.after, moved
        assert moved.before == state.value, moved
        state = cell.state


def walk(seed: int, steps: int, policy: MemoryPolicy) -> None:
    settings = msgspec.structs.replace(SETTINGS, memory_policy=policy)

    async def main() -> None:
        rng = random.Random(seed)
        async with pool_rig(places=2, settings=settings) as rig:
            walk = Walk(rig, rng)
            for _ in range(steps):
                walk.act()
                await asyncio.sleep(rng.choice([0.0, 0.0, 0.01, 0.05]))
                status = rig.status()
                assert status.queued <= 8, status
            rig.set_faults("m")
            rig.pool.reset("m")
            outcomes = await asyncio.gather(*walk.requests, return_exceptions=True)
            await asyncio.gather(*walk.commands)
            for outcome in outcomes:
                assert isinstance(outcome, str | asyncio.CancelledError), repr(outcome)
            await wait_until(lambda: rig.status().active == 0, 10)
            assert rig.status().queued == 0
            check_table(rig.transitions)
            rig.pool.reset("m")
            assert (await rig.complete()).status == 200
            await wait_until(lambda: len(rig.records()) == 1, 10, "one engine is left")

    run(main(), 60 + steps * 0.5)


@pytest.mark.parametrize("policy", ["keep_then_commit", "evict_first"])
def test_a_random_walk_keeps_every_promise(policy: MemoryPolicy) -> None:
    seed = int(os.environ.get("MLX_ISOLATE_TEST_SEED", time.time_ns() % 1_000_000))
    steps = int(os.environ.get("MLX_ISOLATE_TEST_STEPS", "100"))
    print(f"seed {seed}")
    walk(seed, steps, policy)
