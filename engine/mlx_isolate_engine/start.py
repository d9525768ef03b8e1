"""An engine's first moments: command line, guard and signals, before anything heavy is imported."""

import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from mlx_isolate_engine.arguments import Arguments, parse_arguments
from mlx_isolate_engine.aside import StopSignal, work_aside
from mlx_isolate_shared.lifeline import die_with_parent, watch_lifeline


def begin(argv: Sequence[str], work: Callable[[Arguments, StopSignal], NoReturn]) -> NoReturn:
    """Parse the command line, then run `work` to the end of the process, beside the main thread.

    From here on the process ends with its supervisor, or when told.
    """
    arguments = parse_arguments(argv)
    leave_removed_folder()
    for descriptor in (arguments.spec_fd, arguments.report_fd, arguments.lifeline_fd):
        os.set_inheritable(descriptor, False)
    die_with_parent(arguments.lifeline_fd)
    stop = StopSignal()
    watch_lifeline(arguments.lifeline_fd)
    work_aside(lambda: work(arguments, stop), arguments.nice)


def leave_removed_folder() -> None:
    """Leave a working folder that was removed: libraries ask for its name when they are imported.

    A daemon started in a folder that is gone since then could replace no engine.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")
