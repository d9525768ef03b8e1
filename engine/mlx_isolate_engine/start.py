"""An engine's first moments: command line, guard and signals, before anything heavy is imported."""

import os
import signal
from collections.abc import Sequence

from mlx_isolate_engine.arguments import Arguments, parse_arguments
from mlx_isolate_engine.lifeline import die_with_parent, watch_lifeline


def begin(argv: Sequence[str]) -> Arguments:
    """Parse the command line; from here on the process ends with its supervisor, or when told."""
    arguments = parse_arguments(argv)
    for descriptor in (arguments.spec_fd, arguments.report_fd, arguments.lifeline_fd):
        os.set_inheritable(descriptor, False)
    die_with_parent(arguments.lifeline_fd)
    # SIGINT is the terminal's, for the supervisor; until there is something to stop, SIGTERM ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_quietly)
    watch_lifeline(arguments.lifeline_fd)
    return arguments


def _exit_quietly(number: int, frame: object) -> None:
    os._exit(0)
