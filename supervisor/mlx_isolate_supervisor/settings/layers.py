"""Resolution of settings: flag over environment over file over default, with every origin kept.

Pure: it is given the texts of all layers and the sizes of memory and disk.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

import msgspec

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.config import GroupSpec, ModelSpec, ServeSettings
from mlx_isolate_supervisor.settings.file_facts import FileFacts
from mlx_isolate_supervisor.settings.flags import BY_NAME, ENVIRONMENT_PREFIX, FLAGS, Flag
from mlx_isolate_supervisor.settings.models import check_unique
from mlx_isolate_supervisor.settings.quantities import Share

# Of the machine's memory, what engines may use together; and of that, their prompt caches.
MEMORY_BUDGET_SHARE = 0.75
PROMPT_CACHE_BYTES = 8_000_000_000

# Read by the client commands.
_OTHER_VARIABLES = {"MLX_ISOLATE_URL"}


class FileLayer(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration file says.

    Attributes:
        path: for messages.
        values: flag name to text or texts, of both scopes.
        models: complete except for engine settings, which are in `engine`.
        engine: model id to flag name to text.
        holds_keys: an API key stands in it itself, not only the name of a variable that has one.
        variables: names of the environment's variables that it uses.
        facts: of the file just before it was read; None where it was not read from one.
    """

    path: str
    values: Mapping[str, str | Sequence[str]] = {}
    models: tuple[ModelSpec, ...] = ()
    engine: Mapping[str, Mapping[str, str | Sequence[str]]] = {}
    groups: tuple[GroupSpec, ...] = ()
    holds_keys: bool = False
    variables: tuple[str, ...] = ()
    facts: FileFacts | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Totals that shares such as `20%` are taken of, in bytes.

    Attributes:
        gpu_bytes: what engines may use of the GPU, or of memory through it; None = not known.
    """

    memory_bytes: int
    gpu_bytes: int | None = None
    disk_bytes: Callable[[str], int]


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """All sources of settings.

    Attributes:
        flags: flag name to the text (or texts) typed.
        environment: the process's environment.
        file: the configuration file, if there is one.
        models: models of the command line, (id, located model).
    """

    flags: Mapping[str, str | Sequence[str]]
    environment: Mapping[str, str]
    models: tuple[tuple[str, str], ...] = ()
    file: FileLayer | None = None


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to run with.

    Attributes:
        settings: the values.
        engine: engine settings as they hold for every model without its own.
        origins: daemon field or `engine.<field>` to the place its value came from; fields that
            are absent have their default.
        api_key_file: path of a file with more keys, not read yet.
        key_holder: path of the configuration file where that itself holds keys.
        variables: names of the environment's variables that the configuration file uses.
        file_facts: of the configuration file, as it was read.
        warnings: sentences for the log.
        names_no_model: nobody asked for a model, so the demo is served.
    """

    settings: ServeSettings
    engine: EngineSettings
    origins: Mapping[str, str]
    api_key_file: str | None = None
    key_holder: str | None = None
    variables: tuple[str, ...] = ()
    file_facts: FileFacts | None = None
    warnings: tuple[str, ...] = ()
    names_no_model: bool = False


def resolve(layers: Layers, machine: Machine) -> Resolved:
    """Settle every field by its highest layer.

    Raises:
        ConfigError: naming the field, where its value came from, and the remedy.
    """
    values: dict[str, dict[str, object]] = {"daemon": {}, "engine": {}}
    origins: dict[str, str] = {}
    for flag in FLAGS:
        found = _pick(flag, layers)
        if found is not None:
            origin, text = found
            values[flag.scope][flag.field] = _parse(flag, origin, text)
            origins[origin_key(flag)] = origin
    daemon = values["daemon"]
    engine = _settle(values["engine"], daemon, machine)
    api_key_file = daemon.pop("api_key_file", None)
    daemon = _shares(daemon, machine, "")
    models = _command_line_models(layers, engine) + _file_models(layers.file, engine, machine)
    check_unique([name for model in models for name in (model.id, *model.aliases)])
    for model in models:
        try:
            _utf8(model.model)
        except ValueError as error:
            raise ConfigError(f"the path of {model.id}: {model.model!r} {error}.") from None
    groups = layers.file.groups if layers.file else ()
    settings = msgspec.convert(daemon | {"models": models, "groups": groups}, ServeSettings)
    settings = share_prompt_cache(settings, machine)
    return Resolved(
        settings=settings,
        engine=engine,
        origins=origins,
        api_key_file=None if api_key_file is None else str(api_key_file),
        key_holder=layers.file.path if layers.file and layers.file.holds_keys else None,
        variables=layers.file.variables if layers.file else (),
        file_facts=layers.file.facts if layers.file else None,
        warnings=_unknown_variables(layers.environment) + _logged_texts(settings),
    )


def _pick(flag: Flag, layers: Layers) -> tuple[str, str | Sequence[str]] | None:
    if flag.name in layers.flags:
        return flag.name, layers.flags[flag.name]
    if flag.variable in layers.environment:
        text = layers.environment[flag.variable]
        return flag.variable, text.split(",") if flag.several else text
    if layers.file is not None and flag.name in layers.file.values:
        return layers.file.path, layers.file.values[flag.name]
    return None


def _parse(flag: Flag, origin: str, text: str | Sequence[str]) -> object:
    texts = [text] if isinstance(text, str) else list(text)
    place = origin if origin in (flag.name, flag.variable) else f"{flag.name} in {origin}"
    if not flag.several and not isinstance(text, str):
        raise ConfigError(f"{place}: a list was given where one value is expected.")
    try:
        values = [flag.parse(_utf8(part.strip() if flag.several else part)) for part in texts]
    except ValueError as error:
        shown = "(hidden)" if flag.secret else ", ".join(repr(part) for part in texts)
        raise ConfigError(f"{place}: {shown} {error}.") from None
    return tuple(values) if flag.several else values[0]


def _utf8(text: str) -> str:
    """The text, if it can be told to engines and shown on pages.

    What the system hands over may be any bytes (the name of a folder, say).

    Raises:
        ValueError: what is wrong with it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not UTF-8") from None
    return text


def origin_key(flag: Flag) -> str:
    """What a flag's value is called in `Resolved.origins`."""
    return flag.field if flag.scope == "daemon" else f"engine.{flag.field}"


def _settle(
    engine: Mapping[str, object], daemon: Mapping[str, object], machine: Machine
) -> EngineSettings:
    """Engine settings with shares resolved and the daemon's limits copied in; checked."""
    copied = {
        name: daemon[name]
        for name in ("sse_ping_interval_s", "body_bytes_max", "header_bytes_max")
        if name in daemon
    }
    folder = str(engine.get("ssd_cache_dir") or "")
    values = _shares({**engine, **copied}, machine, folder)
    settings = msgspec.convert(values, EngineSettings)
    check_engine(settings)
    return settings


def check_engine(settings: EngineSettings) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: naming both and the remedy.
    """
    if settings.ssd_cache_dir is not None and settings.prompt_cache_size == 0:
        raise ConfigError(
            "--prompt-cache-size 0 leaves nothing for --ssd-cache-dir to keep; "
            "raise the first or drop the second."
        )


def _shares(values: Mapping[str, object], machine: Machine, disk_folder: str) -> dict[str, object]:
    """Turn shares into bytes: of the disk for the SSD tier's cap, of the memory elsewhere."""
    settled: dict[str, object] = {}
    for field, value in values.items():
        if isinstance(value, Share):
            of_disk = field == "ssd_cache_bytes_max"
            total = machine.disk_bytes(disk_folder) if of_disk else machine.memory_bytes
            settled[field] = value.of(total)
        else:
            settled[field] = value
    return settled


def _command_line_models(layers: Layers, engine: EngineSettings) -> tuple[ModelSpec, ...]:
    if len(layers.models) > 1:
        for flag in FLAGS:
            if flag.one_model and flag.name in layers.flags:
                raise ConfigError(
                    f"{flag.name} goes with one model and {len(layers.models)} were given; "
                    "set it per model in a configuration file."
                )
    return tuple(
        ModelSpec(id=id, model=model, preload=True, engine=engine) for id, model in layers.models
    )


def _file_models(
    file: FileLayer | None, engine: EngineSettings, machine: Machine
) -> tuple[ModelSpec, ...]:
    if file is None:
        return ()
    models: list[ModelSpec] = []
    for spec in file.models:
        own: dict[str, object] = {}
        for name, text in file.engine.get(spec.id, {}).items():
            flag = BY_NAME[name]
            own[flag.field] = _parse(flag, f"{file.path} (model {spec.id})", text)
        merged = msgspec.structs.asdict(engine) | _shares(
            own, machine, str(own.get("ssd_cache_dir") or engine.ssd_cache_dir or "")
        )
        merged |= {"strip_params": spec.strip_params, "set_params": spec.set_params}
        settings = msgspec.convert(merged, EngineSettings)
        check_engine(settings)
        models.append(msgspec.structs.replace(spec, engine=settings))
    return tuple(models)


def share_prompt_cache(settings: ServeSettings, machine: Machine) -> ServeSettings:
    """Hand out the RAM tier: each engine gets an equal part of what all may have together."""
    usable = min(machine.memory_bytes, machine.gpu_bytes or machine.memory_bytes)
    budget = settings.memory_budget_bytes or int(usable * MEMORY_BUDGET_SHARE)
    total = settings.prompt_cache_bytes
    if total is None:
        total = min(PROMPT_CACHE_BYTES, budget // 4)
    at_once = min(len(settings.models), settings.models_max or len(settings.models))
    part = total // max(1, at_once)
    models = tuple(
        msgspec.structs.replace(
            model, engine=msgspec.structs.replace(model.engine, prompt_cache_bytes=part)
        )
        for model in settings.models
    )
    return msgspec.structs.replace(settings, models=models)


def _unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each variable that looks like a misspelt one of ours."""
    known = {flag.variable for flag in FLAGS} | _OTHER_VARIABLES
    sentences: list[str] = []
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            sentences.append(f"{name} in the environment is no setting of mlx-isolate{hint}")
    return tuple(sentences)


def _logged_texts(settings: ServeSettings) -> tuple[str, ...]:
    """A sentence if what people write goes into the log."""
    names = ", ".join(model.id for model in settings.models if model.engine.log_text)
    if not names:
        return ()
    sentence = (
        f"--log-text is on for {names}: prompts and answers go into the log, /logs and the page, "
        "for everybody who may read those; leave it out to keep them private."
    )
    return (sentence,)
