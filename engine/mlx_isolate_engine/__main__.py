"""`python -P -m mlx_isolate_engine`: the engine process with its real model."""

import sys
from typing import NoReturn

from mlx_isolate_engine.start import begin


def main() -> NoReturn:
    """Guard against orphanhood, then import and run everything else."""
    arguments = begin(sys.argv[1:])
    # Only now: the server's imports take a while, and an orphan must not outlive its supervisor
    # by them.
    from mlx_isolate_engine.app import run
    from mlx_isolate_engine.model_runtime import ModelLoader

    loader = ModelLoader()
    run(arguments, loader.load, loader.prepare)


if __name__ == "__main__":
    main()
