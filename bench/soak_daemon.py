"""`python -m bench.soak_daemon serve …`: the real daemon over engines that can be told to exit."""

import sys
from pathlib import Path

from mlx_isolate_supervisor.cli import main
from mlx_isolate_supervisor.engines.command import EngineCommand

ENGINE = EngineCommand(
    argv=(sys.executable, "-P", str(Path(__file__).with_name("soak_engine.py").resolve()))
)

if __name__ == "__main__":
    sys.exit(main(engine=ENGINE))
