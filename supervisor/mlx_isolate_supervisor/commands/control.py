"""`mlx-isolate load|unload|reload|reset MODEL`: change what a running daemon does with a model."""

import argparse

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.client import add_client_arguments, daemon_of
from mlx_isolate_supervisor.harmless import harmless
from mlx_isolate_supervisor.telemetry.display import describe_ready
from mlx_isolate_supervisor.telemetry.status import ModelStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the daemon's address and --json."""
    parser.add_argument("model", metavar="MODEL", help="id or alias of the model")
    parser.add_argument("--json", action="store_true", help="the model's new state as JSON")
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask for it, wait for the outcome and print it; fails where a model has failed."""
    daemon = daemon_of(args)
    body = daemon.post(f"/models/{args.command}", {"model": args.model})
    model = daemon.decode(body, ModelStatus)
    print(body.decode() if args.json else harmless(outcome_line(model)))
    return exit_codes.FAILED if model.state == "failed" else exit_codes.OK


def outcome_line(model: ModelStatus) -> str:
    """What has become of the model, in one line."""
    if model.state == "ready":
        return describe_ready(model.id, model.load_s, model.facts)
    if model.failure is not None:
        return f"{model.id}: failed: {model.failure.message}"
    return f"{model.id}: {model.state}"
