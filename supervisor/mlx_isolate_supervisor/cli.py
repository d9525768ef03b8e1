"""The command line: picks a subcommand and turns its outcome into an exit status."""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from mlx_isolate_shared.command_line import Parser
from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.harmless import harmless
from mlx_isolate_supervisor.listening import PortTakenError
from mlx_isolate_supervisor.version import installed_version

if TYPE_CHECKING:
    from mlx_isolate_supervisor.engines.command import EngineCommand


class CommandModule(Protocol):
    """What a file in commands/ offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add what the command takes."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit status."""
        ...


# Name to module and help. A module is imported only for the command that is asked for.
COMMANDS = {
    "serve": ("serve", "serve models until stopped"),
    "ps": ("ps", "list the models of a running daemon"),
    "top": ("top", "watch the models of a running daemon in the terminal"),
    "status": ("status", "show the state of a running daemon in full"),
    "logs": ("logs", "show what a running daemon or one of its engines logged"),
    "stop": ("stop", "stop a running daemon"),
    "load": ("control", "load a model and wait until it is ready"),
    "unload": ("control", "unload a model once its requests are done"),
    "reload": ("control", "replace the engine of a model without a gap"),
    "reset": ("control", "forget the failures of a model and try again"),
    "flush": ("flush", "write prompt caches to disk and show the evidence"),
    "drill": ("drill", "break something on purpose and see what is promised kept"),
    "doctor": ("doctor", "examine this machine: would it serve, and what should be better"),
    "service": ("service", "run the daemon as a service of the system"),
    "cache": ("cache", "list, verify, prune or import prompt cache files"),
    "config": ("config", "check, show or import a configuration"),
}


# A write to stdout fails so where its disk is full or its terminal gone.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None, engine: "EngineCommand | None" = None) -> int:
    """Run one command; the exit status (see exit_codes.py).

    Args:
        argv: arguments without the program's name; None = those of this process.
        engine: how `serve` starts an engine; None = the real one.
    """
    _open_missing_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(arguments, engine)
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
        return exit_codes.CUT_BASE + signal.SIGINT


def _run(arguments: list[str], engine: "EngineCommand | None") -> int:
    args = _parse(arguments)
    if args.version:
        print(f"mlx-isolate {installed_version()}")
        return exit_codes.OK
    if args.command is None:
        print("mlx-isolate: give a command; see mlx-isolate --help", file=sys.stderr)
        return exit_codes.USAGE
    try:
        if args.command == "serve":
            from mlx_isolate_supervisor.commands import serve

            return serve.run(args, engine)
        return _module(args.command).run(args)
    except CommandError as error:
        print(f"mlx-isolate: {harmless(str(error))}", file=sys.stderr)
        return exit_codes.FAILED
    except PortTakenError as error:
        print(f"mlx-isolate: {harmless(str(error))}", file=sys.stderr)
        return exit_codes.TAKEN
    except ConfigError as error:
        print(f"mlx-isolate: {harmless(str(error))}", file=sys.stderr)
        return exit_codes.USAGE


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


def _drop_output() -> None:
    """What is still buffered for stdout, and what comes, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="mlx-isolate",
        description="A supervisor that never dies in front of MLX language models that may.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, (_, help) in COMMANDS.items():
        own = commands.add_parser(
            name, help=help, description=help, allow_abbrev=False, add_help=name != "cache"
        )
        if name == asked:
            _module(name).add_arguments(own)
    first = arguments[0] if arguments else ""
    if first.startswith("-") and first not in ("-h", "--help", "--version"):
        # Its value would be taken for the command.
        parser.error(f"give a command before {first}, such as serve")
    return parser.parse_args(arguments)


def _module(command: str) -> CommandModule:
    name = f"mlx_isolate_supervisor.commands.{COMMANDS[command][0]}"
    return cast(CommandModule, import_module(name))


if __name__ == "__main__":
    sys.exit(main())
