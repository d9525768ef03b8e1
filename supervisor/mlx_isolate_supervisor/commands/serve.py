"""`mlx-isolate serve`: gather the settings, then be the daemon."""

import argparse
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.config import ModelSpec, ServeSettings
from mlx_isolate_supervisor.listening import PortTakenError, bind
from mlx_isolate_supervisor.open_files import allow_many_open_files
from mlx_isolate_supervisor.settings.defaults import NO_DEFAULT, default_text
from mlx_isolate_supervisor.settings.flags import BY_NAME, FLAGS, TOPICS, Flag
from mlx_isolate_supervisor.settings.layers import FileLayer, Layers, Machine, Resolved, resolve
from mlx_isolate_supervisor.settings.models import DEMO, check_demo, name_models

if TYPE_CHECKING:
    from mlx_isolate_supervisor.engines.command import EngineCommand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and every flag of the table."""
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help="a folder, a hub repo id, or 'demo' (the default); each is an engine of its own",
    )
    parser.add_argument(
        "--model",
        dest="more_models",
        action="append",
        default=[],
        metavar="MODEL",
        help="the same, as mlx-lm spells it",
    )
    parser.add_argument(
        "--served-model-name",
        dest="served_names",
        action="append",
        default=[],
        metavar="NAME",
        help="name to serve a model by; once per model, in their order",
    )
    for topic, names in TOPICS.items():
        group = parser.add_argument_group(topic)
        for name in names:
            _add_flag(group.add_argument, BY_NAME[name])
    # For a parent that it is not to outlive.
    parser.add_argument("--lifeline-fd", type=int, help=argparse.SUPPRESS)
    # Sixty flags make no usage line.
    parser.usage = f"{parser.prog} [MODEL ...] [--FLAG VALUE ...]"


def _add_flag(add: Callable[..., object], flag: Flag) -> None:
    default = default_text(flag)
    note = flag.variable if default == NO_DEFAULT else f"default {default}; {flag.variable}"
    help = f"{flag.help} ({note})".replace("%", "%%")
    if flag.is_switch:
        action = argparse.BooleanOptionalAction
        add(flag.name, dest=flag.name, action=action, default=argparse.SUPPRESS, help=help)
    elif flag.several:
        add(
            flag.name,
            dest=flag.name,
            action="append",
            default=argparse.SUPPRESS,
            metavar=flag.metavar,
            help=help,
        )
    else:
        add(flag.name, dest=flag.name, default=argparse.SUPPRESS, metavar=flag.metavar, help=help)


def run(args: argparse.Namespace, engine: "EngineCommand | None" = None) -> int:
    """Serve until a signal; the exit status.

    Raises:
        ConfigError: it cannot start as configured.
    """
    if args.lifeline_fd is not None:
        from mlx_isolate_shared.lifeline import die_with_parent, watch_lifeline

        # Its engines, which have such lines of their own, end with it.
        die_with_parent(args.lifeline_fd)
        watch_lifeline(args.lifeline_fd)
    resolved = _doubt_missing_folders(settings_of(args))
    sockets = _bind(resolved.settings)
    allow_many_open_files()
    try:
        # Imported late: a port that is taken is told in a tenth of the time that this takes.
        from mlx_isolate_supervisor.app import Launch, run_daemon

        read = partial(read_again, args, resolved)
        return run_daemon(Launch(resolved=resolved, sockets=sockets, read=read, engine=engine))
    finally:
        for listener in sockets:
            listener.close()


def _bind(settings: ServeSettings) -> list[socket.socket]:
    """Take the port, or say who has it.

    Raises:
        PortTakenError: another process has it.
        ConfigError: the address cannot be had.
    """
    try:
        return bind(settings.host, settings.port)
    except PortTakenError:
        from mlx_isolate_supervisor.commands.client import daemon_of_settings

        daemon = daemon_of_settings(settings)
        if not daemon.is_ours():
            raise
        raise PortTakenError(
            f"another mlx-isolate serves at {daemon.url}; choose another --port, or end it with "
            f"'mlx-isolate stop --url {daemon.url}'."
        ) from None


def settings_of(args: argparse.Namespace) -> Resolved:
    """The settings that a parsed command line, the environment and the file come to.

    Raises:
        ConfigError: naming the field and the remedy.
    """
    flags = _typed_flags(args)
    file = read_configuration(flags)
    typed = [*args.models, *args.more_models]
    is_silent = not typed and not args.served_names
    # Without any model the demo is served; a file with models is not "without".
    models = () if is_silent and file and file.models else name_models(typed, args.served_names)
    layers = Layers(flags=flags, environment=os.environ, models=models, file=file)
    file_models = file.models if file else ()
    if DEMO in [model for _, model in models] + [spec.model for spec in file_models]:
        check_demo()
    resolved = resolve(layers, this_machine())
    settings = _with_keys(resolved.settings, resolved.api_key_file)
    check_exposure(settings)
    return msgspec.structs.replace(
        resolved, settings=settings, names_no_model=is_silent and not file_models
    )


def read_again(args: argparse.Namespace, started: Resolved) -> Resolved:
    """The settings for a reload of a daemon that runs with `started`.

    Raises:
        ConfigError: as `settings_of`; or a file that had models names none any more: it was
            emptied by mistake or is being written, and the demo is not meant by that; or its last
            key is gone, and the address that needs one is listened on until the next start.
    """
    resolved = _doubt_missing_folders(settings_of(args))
    if resolved.names_no_model and not started.names_no_model:
        raise ConfigError("the file names no model; stop the daemon to serve none.")
    host = started.settings.host
    if not resolved.settings.api_keys and not is_loopback(host):
        raise ConfigError(
            f"{host} is listened on until the next start, and other machines are let in there "
            "with an API key only; keep one until then."
        )
    return resolved


def missing_folders(models: Sequence[ModelSpec]) -> list[ModelSpec]:
    """Those whose folder does not exist; a file may name such, since it may come later."""
    return [
        model for model in models if model.model.startswith("/") and not Path(model.model).is_dir()
    ]


def _doubt_missing_folders(resolved: Resolved) -> Resolved:
    sentences = tuple(
        f"models.{model.id}: there is no folder {model.model}; until there is, the model fails."
        for model in missing_folders(resolved.settings.models)
    )
    return msgspec.structs.replace(resolved, warnings=resolved.warnings + sentences)


def read_configuration(flags: Mapping[str, str | Sequence[str]]) -> FileLayer | None:
    """The file of --config, else of MLX_ISOLATE_CONFIG, as a layer of settings; None without one.

    Raises:
        ConfigError: it cannot be read, or is wrong.
    """
    named = flags.get("--config") or os.environ.get("MLX_ISOLATE_CONFIG")
    if not named:
        return None
    # Imported late: a YAML reader costs start-up time that most starts do not need.
    from mlx_isolate_supervisor.settings.file import read_file

    return read_file(Path(str(named)).expanduser(), os.environ)


def _typed_flags(args: argparse.Namespace) -> dict[str, str | Sequence[str]]:
    given = vars(args)
    typed: dict[str, str | Sequence[str]] = {}
    for flag in FLAGS:
        if flag.name not in given:
            continue
        value = given[flag.name]
        if flag.is_switch:
            typed[flag.name] = "true" if value else "false"
        elif flag.several and not flag.secret:
            typed[flag.name] = [part for text in value for part in text.split(",")]
        else:
            typed[flag.name] = value
    return typed


def this_machine() -> Machine:
    """Totals of this machine's memory and disks."""
    from mlx_isolate_supervisor.engines.memory import physical_bytes
    from mlx_isolate_supervisor.models.devices import FILE_NAME, DeviceBook
    from mlx_isolate_supervisor.user_folders import state_folder

    def disk_bytes(folder: str) -> int:
        path = Path(folder).expanduser().absolute()
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).total

    gpus = DeviceBook(state_folder() / FILE_NAME).known.values()
    gpu_bytes = min((gpu.memory_bytes for gpu in gpus), default=None)
    return Machine(memory_bytes=physical_bytes(), gpu_bytes=gpu_bytes, disk_bytes=disk_bytes)


def _with_keys(settings: ServeSettings, path: str | None) -> ServeSettings:
    if path is None:
        return settings
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"--api-key-file: cannot read {path}: {reason}.") from error
    texts = [line.strip() for line in lines]
    for number, text in enumerate(texts, 1):
        # Taken as it is, nobody who leaves the remark out would be let in.
        if not text.startswith("#") and " #" in text:
            raise ConfigError(
                f"--api-key-file: line {number} of {path} holds more than a key; write comments "
                "on lines of their own."
            )
    keys = tuple(text for text in texts if text and not text.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file: {path} holds no key; write one a line.")
    return msgspec.structs.replace(settings, api_keys=settings.api_keys + keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that is bound to `host`."""
    from ipaddress import ip_address

    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(settings: ServeSettings) -> None:
    """Refuse to be reachable from other machines without a key.

    Raises:
        ConfigError: one sentence with the remedy.
    """
    if not settings.api_keys and not is_loopback(settings.host):
        raise ConfigError(
            f"--host {settings.host} lets other machines in, so an API key is needed; give "
            "--api-key KEY or --api-key-file FILE, or listen on 127.0.0.1."
        )
