"""The real engine, with one addition: SIGUSR2 makes it exit with status 1, as a bug would.

`python -P bench/soak_engine.py …` in the place of `python -P -m mlx_isolate_engine …`.
"""

import os
import signal

from mlx_isolate_engine.__main__ import main

if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, lambda _number, _frame: os._exit(1))
    main()
