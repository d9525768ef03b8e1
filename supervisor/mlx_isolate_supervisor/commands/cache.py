"""`mlx-isolate cache …`: the engine's tool for cache files, run as a process of its own."""

import argparse
import subprocess
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take everything; the tool has its own flags and help."""
    # With a prefix that nobody types, a flag in front, as in `cache --help`, is a word as well.
    parser.prefix_chars = "\0"
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="ls|verify|prune|import …", help="see --help"
    )


def run(args: argparse.Namespace) -> int:
    """Run the tool; its exit status."""
    # Never imported here: it may load mlx, which the supervisor's code stays clear of.
    command = [sys.executable, "-P", "-m", "mlx_isolate_engine.cache.tool", *args.words]
    return subprocess.run(command, check=False).returncode
