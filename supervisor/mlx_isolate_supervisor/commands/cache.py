"""`mlx-isolate cache …`: the engine's tool for cache files, run as a process of its own."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.commands.serve import read_configuration, this_machine
from mlx_isolate_supervisor.settings.layers import Layers, resolve

# Never imported here: it may load mlx, which the supervisor's code stays clear of.
TOOL = (sys.executable, "-P", "-m", "mlx_isolate_engine.cache.tool")
_HELP = ("-h", "--help")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take everything; the tool has its own flags and help."""
    # With a prefix that nobody types, a flag in front, as in `cache --help`, is a word as well.
    parser.prefix_chars = "\0"
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="ls|verify|prune|import …", help="see --help"
    )


def run(args: argparse.Namespace) -> int:
    """Run the tool; its exit status.

    Raises:
        ConfigError: as `serve` would be refused with these settings, or see `folder_of`.
    """
    command = [*TOOL, *_with_folder(args.words)]
    # What is blocked here stays so in the tool: a terminal's Ctrl-C is ours alone to act on, or
    # the tool would show where it was.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    tool = subprocess.Popen(command)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return tool.wait()
    except KeyboardInterrupt:
        tool.terminate()
        tool.wait()
        raise


def _with_folder(words: Sequence[str]) -> list[str]:
    """The tool's arguments, with the folder of the settings where none is typed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--dir")
    parser.add_argument("--config")
    try:
        given, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        told = str(error).removeprefix("argument ")
        raise ConfigError(f"{told}; see mlx-isolate cache --help") from None
    if any(word in _HELP for word in words):
        return rest
    folder = given.dir or folder_of(given.config)
    # Behind the verb: what follows `--` is no flag.
    return rest if folder is None else [*rest[:1], f"--dir={folder}", *rest[1:]]


def folder_of(config: str | None) -> str | None:
    """The cache directory that `serve` would use, from the environment or a file; None = none.

    Args:
        config: path of the configuration file; None = the one of MLX_ISOLATE_CONFIG.

    Raises:
        ConfigError: the settings are wrong, or name several directories.
    """
    flags = {} if config is None else {"--config": config}
    layers = Layers(flags=flags, environment=os.environ, file=read_configuration(flags))
    resolved = resolve(layers, this_machine())
    engines = [resolved.engine, *(model.engine for model in resolved.settings.models)]
    folders = sorted({engine.ssd_cache_dir for engine in engines if engine.ssd_cache_dir})
    if len(folders) > 1:
        raise ConfigError(
            f"the settings name several cache directories; give one of them as --dir: "
            f"{', '.join(folders)}."
        )
    return folders[0] if folders else None
