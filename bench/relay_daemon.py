"""`python -m bench.relay_daemon serve …`: the real command line and daemon over a made-up engine."""

import sys
from pathlib import Path

from mlx_isolate_supervisor.cli import main
from mlx_isolate_supervisor.engines.command import EngineCommand

SOURCE = EngineCommand(
    argv=(sys.executable, "-P", str(Path(__file__).with_name("relay_source.py").resolve()))
)

if __name__ == "__main__":
    sys.exit(main(engine=SOURCE))
