"""A stand-in for a supervisor that is about to be killed: starts an engine and waits for ever.

Run as `python -P tests/fakes/engine_parent.py MODEL`; prints the engine's pid and socket, then
`ready` when the engine is.
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.engine_process import EngineProcess


def main() -> None:
    """Start the engine from the main thread, whose end its parent-death signal watches."""
    engine = EngineProcess()
    print(engine.child.pid, engine.folder, flush=True)
    model = sys.argv[1]
    if model != "idle":
        engine.start(model)
    if model == "ok":
        engine.wait_ready()
    print("ready", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
