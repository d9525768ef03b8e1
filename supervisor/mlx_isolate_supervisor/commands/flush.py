"""`mlx-isolate flush [MODEL]`: make prompt caches durable, and show the evidence."""

import argparse
from typing import Any
from urllib.parse import urlencode

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.client import add_client_arguments, daemon_of
from mlx_isolate_supervisor.commands.numbers import some_seconds
from mlx_isolate_supervisor.harmless import harmless

# What of the evidence is told in words.
_WORDS = ("durable", "trouble")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --timeout, --json and the daemon's address."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="only this model")
    parser.add_argument(
        "--timeout",
        type=some_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for the disk (default %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="the daemon's answer as it is")
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask for it and print one line a model; fails where not everything is on disk."""
    query = {"timeout_s": f"{args.timeout:g}"} | ({"model": args.model} if args.model else {})
    daemon = daemon_of(args)
    path = "/admin/cache/flush"
    answer = daemon.ask("POST", f"{path}?{urlencode(query)}")
    found: dict[str, Any] = daemon.decode(answer.body, dict[str, Any])
    if "models" not in found:
        raise daemon.refusal(answer, path)
    if args.json:
        print(answer.body.decode())
    else:
        for line in flush_lines(found):
            print(harmless(line))
    return exit_codes.OK if answer.status == 200 else exit_codes.FAILED


def flush_lines(found: dict[str, Any]) -> list[str]:
    """One line a model with its evidence, or with what went wrong."""
    lines: list[str] = []
    for model, evidence in found["models"].items():
        if "error" in evidence:
            lines.append(f"{model}: failed: {evidence['error']['message']}")
            continue
        word = "durable" if evidence.get("durable") else "not all durable"
        facts = ", ".join(f"{key} {value}" for key, value in evidence.items() if key not in _WORDS)
        trouble = evidence.get("trouble")
        lines.append(f"{model}: {word} ({facts})" + (f": {trouble}" if trouble else ""))
    return lines or ["no model is loaded"]
