"""`python -P -m mlx_isolate_engine`: the engine process with its real model."""

import sys
from typing import NoReturn

from mlx_isolate_engine.arguments import Arguments
from mlx_isolate_engine.aside import StopSignal
from mlx_isolate_engine.start import begin


def main() -> NoReturn:
    """Guard against orphanhood, then import and run everything else."""
    begin(sys.argv[1:], _work)


def _work(arguments: Arguments, stop: StopSignal) -> NoReturn:
    # Only now: the server's imports take a while, and an orphan must not outlive its supervisor
    # by them.
    from mlx_isolate_engine.app import run
    from mlx_isolate_engine.model_runtime import ModelLoader

    loader = ModelLoader()
    run(arguments, stop, loader.load, loader.prepare)


if __name__ == "__main__":
    main()
