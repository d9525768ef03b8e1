"""`mlx-isolate logs`: what a running daemon or one of its engines logged."""

import argparse
from urllib.parse import urlencode

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.client import add_client_arguments, daemon_of
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.commands.numbers import whole_number
from mlx_isolate_supervisor.harmless import harmless

DEFAULT_LINES = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, -f, -n and the daemon's address."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="only what concerns this model")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines")
    parser.add_argument(
        "-n",
        "--lines",
        type=whole_number,
        default=DEFAULT_LINES,
        help="how many (default %(default)s)",
    )
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the lines."""
    daemon = daemon_of(args)
    query = {"lines": str(args.lines)}
    if args.model:
        query["model"] = args.model
    if args.follow:
        for line in daemon.lines(f"/logs/stream?{urlencode(query)}"):
            print(harmless(line), flush=True)
        raise CommandError(f"the daemon at {daemon.url} has ended its log; it has stopped or died.")
    for line in daemon.get(f"/logs?{urlencode(query)}").decode("utf-8", "replace").splitlines():
        print(harmless(line))
    return exit_codes.OK
