"""The program `mlx-isolate`: runs its command line, and turns how that ends into an exit status.

Imports next to nothing before it can take a Ctrl-C: whoever changes their mind while a command is
still being imported sees no traceback either.
"""

import errno
import io
import os
import sys

from mlx_isolate_supervisor import exit_codes

# As typing's, which takes as long to import as Python to start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_isolate_supervisor.engines.command import EngineCommand

# A write to stdout fails so where its disk is full or its terminal gone.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: "Sequence[str] | None" = None, engine: "EngineCommand | None" = None) -> int:
    """Run one command; the exit status (see exit_codes.py).

    Args:
        argv: arguments without the program's name; None = those of this process.
        engine: how `serve` starts an engine; None = the real one.
    """
    try:
        _open_missing_streams()
        _show_what_has_no_character()
        arguments = list(sys.argv[1:] if argv is None else argv)
        try:
            from mlx_isolate_supervisor import subcommands

            return subcommands.run(arguments, engine)
        finally:
            # Now, while it can still be told that it failed.
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output (head, less) has left; nothing more can be said to it.
        _drop_output()
        return exit_codes.OK
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _drop_output()
        print(f"mlx-isolate: the output cannot be written: {error.strerror}", file=sys.stderr)
        return exit_codes.FAILED
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def _open_missing_streams() -> None:
    """Give a process that was started without its standard streams empty ones.

    Else the first sockets and pipes would get their numbers, and engines and libraries write there.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _show_what_has_no_character() -> None:
    """Let stdout show as an escape what its encoding lacks, as stderr does: a model's name, say."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What is still buffered for stdout, and what comes, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
