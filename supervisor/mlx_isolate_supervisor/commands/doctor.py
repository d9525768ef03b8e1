"""`mlx-isolate doctor [MODEL…]`: would it serve here, and what should be better."""

import argparse

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands import serve
from mlx_isolate_supervisor.commands.json_output import print_json
from mlx_isolate_supervisor.doctor.examine import examine
from mlx_isolate_supervisor.doctor.findings import Finding, fault, lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and everything that `serve` takes."""
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Examine; fails where a finding would stop it from serving."""
    findings = examined(args)
    if args.json:
        print_json({"findings": findings})
    else:
        print("\n".join(lines(findings)))
    has_fault = any(finding.level == "fault" for finding in findings)
    return exit_codes.FAILED if has_fault else exit_codes.OK


def examined(args: argparse.Namespace) -> list[Finding]:
    """The findings; settings that no daemon starts with are the only one."""
    try:
        resolved = serve.settings_of(args)
    except ConfigError as error:
        remedy = "change that; until then nothing else can be examined"
        return [fault("settings", str(error), remedy)]
    return list(examine(resolved))
