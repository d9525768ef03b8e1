"""An engine's command line: what tells it apart in ps, and the pipes that it was given."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Arguments:
    """The parsed command line.

    Attributes:
        id: name of the model.
        incarnation: number of this spawn, from 1.
        spec_fd: pipe to read the spec from.
        report_fd: pipe to report on.
        lifeline_fd: pipe whose end means exit.
        nice: how much lower the CPU priority of all work is than the process' own.
    """

    id: str
    incarnation: int
    spec_fd: int
    report_fd: int
    lifeline_fd: int
    nice: int


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the command line; prints a message and exits with status 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="mlx_isolate_engine",
        description="One model's engine. The supervisor starts it; it is of no use by itself.",
    )
    parser.add_argument("--id", required=True, help="name of the model, for ps to show")
    parser.add_argument("--incarnation", type=int, required=True, help="number of this spawn")
    parser.add_argument("--spec-fd", type=int, required=True, help="pipe to read the spec from")
    parser.add_argument("--report-fd", type=int, required=True, help="pipe to report on")
    parser.add_argument("--lifeline-fd", type=int, required=True, help="pipe whose end means exit")
    parser.add_argument("--nice", type=int, default=0, help="steps of lower CPU priority")
    return Arguments(**vars(parser.parse_args(argv)))
