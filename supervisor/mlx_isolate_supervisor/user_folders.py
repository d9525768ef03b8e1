"""The user's folders for what is kept, logged and cached, where no setting names others.

The library that knows where they lie on each system is loaded when one is asked for.
"""

from pathlib import Path

_NAME = "mlx-isolate"


def state_folder() -> Path:
    """What earlier runs have learnt."""
    from platformdirs import user_state_path

    return user_state_path(_NAME, appauthor=False)


def log_folder() -> Path:
    """Log files."""
    from platformdirs import user_log_path

    return user_log_path(_NAME, appauthor=False)


def cache_folder() -> Path:
    """Converted models."""
    from platformdirs import user_cache_path

    return user_cache_path(_NAME, appauthor=False)
