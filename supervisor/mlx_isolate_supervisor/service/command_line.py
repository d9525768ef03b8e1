"""The daemon's command line as a service runs it: absolute paths, no secrets, nothing inherited."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from mlx_isolate_supervisor.listening import url_of
from mlx_isolate_supervisor.service.definition import PASSED_ON, Definition, File
from mlx_isolate_supervisor.settings.flags import FLAGS, Flag
from mlx_isolate_supervisor.settings.layers import Resolved
from mlx_isolate_supervisor.settings.models import name_models

# -P: the folder that a service starts in must not be where modules are found.
PROGRAM = (sys.executable, "-P", "-m", "mlx_isolate_supervisor.cli")
_PATHS = ("--config", "--run-dir", "--log-dir", "--cache-dir", "--api-key-file", "--ssd-cache-dir")
# A path, or the name of something elsewhere.
_PERHAPS_PATHS = ("--adapter-path", "--draft-model", "--blas")


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be installed: the service, and the file of its keys where there are any."""

    service: Definition
    key_file: File | None


def installation(
    name: str,
    args: argparse.Namespace,
    resolved: Resolved,
    *,
    config_home: Path,
    program: Sequence[str] = PROGRAM,
    environment: Mapping[str, str] = os.environ,
) -> Installation:
    """From a parsed `serve` command line to a service that serves the same.

    Args:
        name: of the service.
        args: as `serve` parses them.
        resolved: what they and the environment come to.
        config_home: where the user's configuration lies.
        program: what comes before `serve`.
        environment: of the shell that installs; settings in it become flags.
    """
    settings = resolved.settings
    keys = config_home / "mlx-isolate" / f"{name}.keys"
    words = [*_models(args), *_flags(args, environment)]
    typed_keys = _typed_keys(args, environment)
    key_file = None
    if typed_keys:
        # On the command line every user of the machine could read them.
        words += ["--api-key-file", str(keys)]
        content = "".join(f"{key}\n" for key in settings.api_keys).encode()
        key_file = File(path=str(keys), mode=0o600, content=content)
    service = Definition(
        name=name,
        argv=(*program, "serve", *words),
        environment={n: environment[n] for n in PASSED_ON if environment.get(n)},
        url=url_of(settings.host, settings.port),
        shutdown_timeout_s=settings.shutdown_timeout_s,
    )
    return Installation(service=service, key_file=key_file)


def _models(args: argparse.Namespace) -> Iterator[str]:
    typed = [*args.models, *args.more_models]
    for name, model in name_models(typed, args.served_names) if typed else ():
        yield model
        yield f"--served-model-name={name}"


def _flags(args: argparse.Namespace, environment: Mapping[str, str]) -> Iterator[str]:
    given = vars(args)
    has_typed_keys = bool(_typed_keys(args, environment))
    for flag in FLAGS:
        if flag.secret or (flag.name == "--api-key-file" and has_typed_keys):
            continue
        if flag.name in given:
            value = given[flag.name]
        elif environment.get(flag.variable):
            value = _from_environment(flag, environment[flag.variable])
        else:
            continue
        yield from _spelled(flag, value)


def _typed_keys(args: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    return bool(vars(args).get("--api-key") or environment.get("MLX_ISOLATE_API_KEY"))


def _from_environment(flag: Flag, text: str) -> object:
    if flag.is_switch:
        return flag.parse(text)
    return text.split(",") if flag.several else text


def _spelled(flag: Flag, value: object) -> Iterator[str]:
    if flag.is_switch:
        yield flag.name if value else f"--no-{flag.name.removeprefix('--')}"
        return
    values: Sequence[object] = value if isinstance(value, list) else [value]
    for one in values:
        # In one word, so that a value may begin with a dash.
        yield f"{flag.name}={_absolute(flag.name, str(one))}"


def _absolute(name: str, text: str) -> str:
    path = Path(text).expanduser()
    if text and (name in _PATHS or (name in _PERHAPS_PATHS and path.exists())):
        return str(path.absolute())
    return text
