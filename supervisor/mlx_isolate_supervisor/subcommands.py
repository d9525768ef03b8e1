"""The subcommands of `mlx-isolate`: reads a command line, and runs the one that it names."""

import argparse
import sys
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
# What other programs call some of them; by its letters, `start` would be near to `status`.
ELSEWHERE = {"start": "serve", "run": "serve", "list": "ps", "ls": "ps"}


def run(arguments: list[str], engine: "EngineCommand | None") -> int:
    """Run one command; the exit status. What it cannot do is told in a sentence on stderr.

    Args:
        arguments: without the program's name.
        engine: how `serve` starts an engine; None = the real one.
    """
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


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="mlx-isolate",
        description="A supervisor that never dies in front of MLX language models that may.",
        allow_abbrev=False,
    )
    parser.elsewhere = ELSEWHERE
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
