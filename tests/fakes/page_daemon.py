"""`python -m tests.fakes.page_daemon serve …`: the real daemon over engines with scripted answers."""

import sys
from pathlib import Path

from mlx_isolate_supervisor.cli import main
from mlx_isolate_supervisor.engines.command import EngineCommand

ENGINE = EngineCommand(
    argv=(sys.executable, "-P", str(Path(__file__).with_name("page_engine.py").resolve()))
)

if __name__ == "__main__":
    sys.exit(main(engine=ENGINE))
