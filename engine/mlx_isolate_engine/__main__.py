"""`python -P -m mlx_isolate_engine`: the engine process with its real model."""

import sys

from mlx_isolate_engine.app import run
from mlx_isolate_engine.model_runtime import ModelLoader

if __name__ == "__main__":
    loader = ModelLoader()
    run(sys.argv[1:], loader.load, loader.prepare)
