"""Every setting that can be given from outside, once: its flag, field, spelling and help.

The command line, the environment (`--queue-timeout` is `MLX_ISOLATE_QUEUE_TIMEOUT`), the file's
engine keys and the configuration page are all made from this table.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from mlx_isolate_supervisor.settings.flag_values import (
    any_text,
    choice,
    fraction,
    gigabytes,
    json_names,
    json_object,
    kv_bits,
    port,
    positive,
    temperature,
    text,
)
from mlx_isolate_supervisor.settings.quantities import (
    parse_size,
    parse_switch,
    parse_time,
    parse_whole,
)

ENVIRONMENT_PREFIX = "MLX_ISOLATE_"

Scope = Literal["daemon", "engine"]


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One setting.

    Attributes:
        name: as typed, with its dashes.
        field: in ServeSettings (scope daemon) or EngineSettings (scope engine).
        parse: from text to the field's value; raises ValueError with a sentence part.
        metavar: placeholder in the help; "" for a switch.
        several: may be given more than once; in the environment separated by commas.
        secret: its value is never shown.
        one_model: belongs to one model, so it cannot be given for several on a command line.
    """

    name: str
    field: str
    scope: Scope
    help: str
    parse: Callable[[str], object]
    metavar: str = ""
    several: bool = False
    secret: bool = False
    one_model: bool = False

    @property
    def is_switch(self) -> bool:
        """Takes no value: `--metrics`, `--no-metrics`."""
        return self.metavar == ""

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return ENVIRONMENT_PREFIX + self.name.removeprefix("--").replace("-", "_").upper()


def _daemon(
    name: str,
    field: str,
    parse: Callable[[str], object],
    metavar: str,
    help: str,
) -> Flag:
    return Flag(name=name, field=field, scope="daemon", parse=parse, metavar=metavar, help=help)


def _engine(
    name: str, parse: Callable[[str], object], metavar: str, help: str, field: str = ""
) -> Flag:
    return Flag(
        name=name,
        field=field or name.removeprefix("--").replace("-", "_"),
        scope="engine",
        parse=parse,
        metavar=metavar,
        help=help,
        one_model=name in ("--adapter-path", "--adapters", "--draft-model", "--chat-template"),
    )


FLAGS: tuple[Flag, ...] = (
    _daemon("--host", "host", text, "ADDRESS", "address to listen on"),
    _daemon("--port", "port", port, "PORT", "port to listen on; 0 lets the system choose"),
    _daemon("--config", "config_path", text, "FILE", "configuration file (YAML)"),
    _daemon("--watch-config", "watch_config", parse_switch, "", "reload the file when it changes"),
    _daemon("--run-dir", "run_dir", text, "FOLDER", "folder for the sockets of the engines"),
    _daemon("--log-dir", "log_dir", any_text, "FOLDER", "folder of the log file; '' for none"),
    _daemon("--cache-dir", "cache_home", text, "FOLDER", "folder for converted models"),
    _daemon(
        "--log-level",
        "log_level",
        choice("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
        "DEBUG|INFO|WARNING|ERROR|CRITICAL",
        "how much to log",
    ),
    _daemon(
        "--log-format",
        "log_format",
        choice("text", "json"),
        "text|json",
        "how the log file and stderr are written; json is one object a line",
    ),
    Flag(
        name="--allowed-origins",
        field="allowed_origins",
        scope="daemon",
        parse=text,
        metavar="ORIGIN,…",
        help="browser origins that may call; '*' for all, 'loopback' for those of this machine",
        several=True,
    ),
    Flag(
        name="--allowed-hosts",
        field="allowed_hosts",
        scope="daemon",
        parse=text,
        metavar="NAME,…",
        help="further names by which clients may address this server; '*' for any",
        several=True,
    ),
    Flag(
        name="--api-key",
        field="api_keys",
        scope="daemon",
        parse=text,
        metavar="KEY",
        help="key that clients must send; may be given several times",
        several=True,
        secret=True,
    ),
    _daemon("--api-key-file", "api_key_file", text, "FILE", "file with one API key a line"),
    _daemon("--metrics", "metrics", parse_switch, "", "answer /metrics"),
    _daemon("--blas", "blas", text, "auto|off|PATH", "BLAS to preload into CPU engines"),
    _daemon("--standby", "standby", parse_whole, "N", "spare engines kept ready to take a model"),
    _daemon("--models-max", "models_max", parse_whole, "N", "models loaded at once; 0 = any"),
    _daemon(
        "--memory-budget-gb",
        "memory_budget_bytes",
        gigabytes,
        "GB",
        "memory for all engines, in GB or as 20%",
    ),
    _daemon(
        "--memory-policy",
        "memory_policy",
        choice("auto", "keep_then_commit", "evict_first"),
        "auto|keep_then_commit|evict_first",
        "whether a new engine may load beside the one it replaces",
    ),
    _daemon("--ttl", "ttl_s", parse_time, "TIME", "unload a model after so much idle time"),
    _daemon(
        "--max-queued-requests",
        "max_queued_requests",
        parse_whole,
        "N",
        "waiting requests a model; more get 429",
    ),
    _daemon(
        "--max-queued-bytes",
        "max_queued_bytes",
        parse_size,
        "SIZE",
        "bytes of all waiting requests; more get 429",
    ),
    _daemon("--queue-timeout", "queue_timeout_s", parse_time, "TIME", "longest wait in the queue"),
    _daemon(
        "--watchdog-timeout",
        "watchdog_timeout_s",
        parse_time,
        "TIME",
        "busy without progress for so long is hung; 0 = off",
    ),
    _daemon(
        "--report-silence",
        "report_silence_s",
        parse_time,
        "TIME",
        "an engine silent for so long is hung; 0 = off",
    ),
    _daemon(
        "--start-timeout",
        "start_timeout_s",
        parse_time,
        "TIME",
        "loading without progress for so long has failed",
    ),
    _daemon("--stop-timeout", "stop_timeout_s", parse_time, "TIME", "from SIGTERM to SIGKILL"),
    _daemon(
        "--drain-timeout",
        "drain_timeout_s",
        parse_time,
        "TIME",
        "time that running requests get at an unload, reload or switch",
    ),
    _daemon(
        "--shutdown-timeout", "shutdown_timeout_s", parse_time, "TIME", "the whole of a shutdown"
    ),
    _daemon(
        "--sse-ping-interval",
        "sse_ping_interval_s",
        parse_time,
        "TIME",
        "silence before a keepalive comment; 0 = off",
    ),
    _daemon("--max-body-bytes", "body_bytes_max", parse_size, "SIZE", "largest request body"),
    _daemon("--max-header-bytes", "header_bytes_max", parse_size, "SIZE", "largest request header"),
    _daemon(
        "--prompt-cache-bytes",
        "prompt_cache_bytes",
        parse_size,
        "SIZE",
        "prompt cache in memory, all models together",
    ),
    _engine("--adapter-path", text, "FOLDER", "LoRA adapter of the model"),
    _engine(
        "--adapters",
        json_names,
        "JSON",
        'LoRA adapters that requests choose by name, as {"name": "folder"}',
    ),
    _engine("--draft-model", text, "MODEL", "model for speculative decoding"),
    _engine("--num-draft-tokens", positive, "N", "tokens drafted at a time"),
    _engine("--log-text", parse_switch, "", "log prompts and answers; they may be private"),
    _engine("--trust-remote-code", parse_switch, "", "run code that comes with the tokenizer"),
    _engine("--chat-template", text, "TEMPLATE", "chat template, or a file that holds it"),
    _engine(
        "--use-default-chat-template",
        parse_switch,
        "",
        "a plain chat template where the tokenizer has none",
    ),
    _engine(
        "--chat-template-args",
        json_object,
        "JSON",
        'arguments of the chat template, as {"enable_thinking": false}',
    ),
    _engine("--temp", temperature, "T", "default sampling temperature"),
    _engine("--top-p", fraction, "P", "default nucleus sampling"),
    _engine("--top-k", parse_whole, "K", "default top-k; 0 = off"),
    _engine("--min-p", fraction, "P", "default min-p; 0 = off"),
    _engine("--max-tokens", positive, "N", "default limit of generated tokens"),
    _engine(
        "--decode-concurrency", positive, "N", "requests decoded together; 1 = the serial lane"
    ),
    _engine("--prompt-concurrency", positive, "N", "prompts processed together"),
    _engine("--prefill-step-size", positive, "N", "prompt tokens a step"),
    _engine("--prompt-cache-size", parse_whole, "N", "prompts kept in memory, a model"),
    _engine("--kv-bits", kv_bits, "BITS", "quantize the KV cache to 2, 3, 4, 5, 6 or 8 bits"),
    _engine("--kv-group-size", positive, "N", "group size of the KV quantization"),
    _engine("--quantized-kv-start", parse_whole, "N", "position at which quantization starts"),
    _engine("--ssd-cache-dir", text, "FOLDER", "keep prompt caches on disk here"),
    _engine("--ssd-cache-max-gb", gigabytes, "GB", "cap of that folder", "ssd_cache_bytes_max"),
    _engine("--ssd-cache-verify", parse_switch, "", "check every tensor read from it"),
    _engine(
        "--ssd-restore",
        choice("auto", "always", "never"),
        "auto|always|never",
        "restore from disk; auto = where that is faster",
    ),
    _engine("--ssd-write-behind", parse_switch, "", "write completed prompts to disk when idle"),
    _engine(
        "--ssd-spill-queue-gb",
        gigabytes,
        "GB",
        "waiting writes of evicted prompts",
        "ssd_spill_queue_bytes",
    ),
    _engine(
        "--ssd-demote-idle",
        parse_time,
        "TIME",
        "move idle prompts to disk after so long",
        "ssd_demote_idle_s",
    ),
    _engine("--max-step", parse_time, "TIME", "longest gap of a running stream", "max_step_s"),
    _engine(
        "--stall-timeout",
        parse_time,
        "TIME",
        "cancel for a client that has not read for so long",
        "stall_timeout_s",
    ),
)

BY_NAME: dict[str, Flag] = {flag.name: flag for flag in FLAGS}

# The headings under which the help and the configuration page show the flags; each flag once.
TOPICS: dict[str, tuple[str, ...]] = {
    "where and how it runs": (
        *("--host", "--port", "--config", "--watch-config", "--run-dir", "--log-dir"),
        *("--cache-dir", "--log-level", "--log-format", "--log-text", "--metrics", "--blas"),
    ),
    "who may call": ("--api-key", "--api-key-file", "--allowed-origins", "--allowed-hosts"),
    "memory": (
        *("--memory-budget-gb", "--models-max", "--memory-policy", "--ttl", "--standby"),
        "--prompt-cache-bytes",
    ),
    "limits of requests": (
        *("--max-queued-requests", "--max-queued-bytes", "--queue-timeout", "--max-body-bytes"),
        *("--max-header-bytes", "--sse-ping-interval", "--stall-timeout"),
    ),
    "watching and stopping engines": (
        *("--watchdog-timeout", "--report-silence", "--start-timeout", "--stop-timeout"),
        *("--drain-timeout", "--shutdown-timeout"),
    ),
    "the model": (
        *(
            "--adapter-path",
            "--adapters",
            "--draft-model",
            "--num-draft-tokens",
            "--trust-remote-code",
        ),
        *("--chat-template", "--use-default-chat-template", "--chat-template-args"),
    ),
    "defaults of requests": ("--temp", "--top-p", "--top-k", "--min-p", "--max-tokens"),
    "batching": (
        *("--decode-concurrency", "--prompt-concurrency", "--prefill-step-size", "--max-step"),
        *("--kv-bits", "--kv-group-size", "--quantized-kv-start"),
    ),
    "prompt cache": (
        *("--prompt-cache-size", "--ssd-cache-dir", "--ssd-cache-max-gb", "--ssd-cache-verify"),
        *("--ssd-restore", "--ssd-write-behind", "--ssd-spill-queue-gb", "--ssd-demote-idle"),
    ),
}
