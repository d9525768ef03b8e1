"""In which pieces prompts run on a device of a given speed, and when first tokens come.

A simulation: the engine's own lane, generator and policies on a model that only costs time, so it
says what the policies do on a machine that is not here. Not measured: anything real.

    python -m bench.trace_prefill
    python -m bench.trace_prefill --tokens-per-s 20000 --pass-ms 8 --new-shape-ms 100
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

from tests.fakes.simulated_device import FAST_GPU, SMALL_CPU, SimulatedLane, Speed

from bench.leaving import leaving_nothing

ONE = (200, 2000, 30_000)
CROWDS = (4, 16)
CROWD_LENGTHS = (200, 1000, 2000, 500)
WARM_TOKENS = 14
STREAM_TOKENS = 100_000


def _pieces(lane: SimulatedLane) -> str:
    groups = [(piece, len(list(run))) for piece, run in itertools.groupby(lane.prefills)]
    return " ".join(
        f"{rows}x{width}" + (f"*{times}" if times > 1 else "") for (rows, width), times in groups
    )


def _trace(folder: Path, speed: Speed, lengths: list[int], *, rehearsed: bool, busy: bool) -> str:
    lane = SimulatedLane(folder, speed, rehearsed=rehearsed)
    gap = ""
    stream = None
    if busy:
        stream = lane.ask(8, STREAM_TOKENS)
        while not stream.texts:
            lane.step()
        lane.model.passes.clear()
    asked = [lane.ask(length) for length in lengths]
    lane.finish(*asked)
    if stream is not None:
        gap = f" gap {stream.largest_gap_s * 1000:.0f} ms"
    first = statistics.median(each.first_token_s for each in asked) * 1000
    return f"first token {first:.0f} ms{gap}: {_pieces(lane)}"


def main(argv: list[str] | None = None) -> None:
    """Print the pieces of some prompts, alone and in crowds, beside a stream and without one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens-per-s",
        type=float,
        help="speed of the device (default: two made-up ones, a fast GPU and a small CPU)",
    )
    parser.add_argument(
        "--pass-ms", type=float, default=5.0, help="what any pass takes besides, ms (default 5)"
    )
    parser.add_argument(
        "--new-shape-ms",
        type=float,
        default=0.0,
        help="what the first pass of each shape takes besides, ms (default 0)",
    )
    arguments = parser.parse_args(argv)
    speeds = {"fast GPU": (FAST_GPU, True), "small CPU": (SMALL_CPU, False)}
    if arguments.tokens_per_s is not None:
        speed = Speed(
            tokens_per_s=arguments.tokens_per_s,
            pass_s=arguments.pass_ms / 1000,
            new_shape_s=arguments.new_shape_ms / 1000,
        )
        speeds = {"given": (speed, True)}
    loads = {f"1 client, {length} tokens": [length] for length in ONE}
    for clients in CROWDS:
        lengths = [CROWD_LENGTHS[place % len(CROWD_LENGTHS)] for place in range(clients)]
        loads[f"{clients} clients, mixed"] = lengths
        loads[f"{clients} clients, warm"] = [WARM_TOKENS] * clients
    with tempfile.TemporaryDirectory() as folder:
        number = itertools.count()
        for device, (speed, rehearsed) in speeds.items():
            print(f"{device}: {speed}")
            for (load, lengths), busy in itertools.product(loads.items(), (False, True)):
                where = Path(folder) / str(next(number))
                line = _trace(where, speed, lengths, rehearsed=rehearsed, busy=busy)
                print(f"  {load}{', beside a stream' if busy else ''}: {line}")


if __name__ == "__main__":
    with leaving_nothing():
        main(sys.argv[1:])
