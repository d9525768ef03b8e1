"""`mlx-isolate cache`: list, verify, prune and import the files of a cache directory.

Works on the directory without a running engine and, but for `import`, without loading mlx. Other
processes may use the directory meanwhile.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlx_isolate_engine.cache.damage import Damage
from mlx_isolate_engine.cache.directory import CacheDirectory, OwnFile, is_quarantined
from mlx_isolate_engine.cache.kv_check import read_header, verify
from mlx_isolate_engine.cache.kv_file import Header
from mlx_isolate_shared.command_line import Parser
from mlx_isolate_shared.errors import CacheError, ConfigError

_DESCRIPTION = (
    "list, verify, prune or import prompt cache files; no daemon is needed, and a running one may "
    "use the folder meanwhile"
)
_FOLDER_HELP = "the cache directory; default: MLX_ISOLATE_SSD_CACHE_DIR, or that of --config"
_FILE_HELP = (
    "configuration file whose ssd_cache_dir is the cache directory (default MLX_ISOLATE_CONFIG)"
)
# The settings of `serve` are the supervisor's to read; it hands a folder of theirs over as --dir.
_NO_FOLDER = (
    "give --dir FOLDER, or --config FILE or MLX_ISOLATE_SSD_CACHE_DIR as serve has them: without "
    "any, serve keeps no prompt cache on disk"
)

EXIT_OK, EXIT_DAMAGED, EXIT_USAGE = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status (1 = damage was found, 2 = cannot be done)."""
    arguments = _parser().parse_args(argv)
    folder: str | None = arguments.dir
    if folder is None:
        verb: Parser = arguments.parser
        verb.error(_NO_FOLDER)
    root = Path(folder).expanduser().absolute()
    try:
        if arguments.command != "import" and not root.is_dir():
            print(f"mlx-isolate: there is no cache directory {root}.", file=sys.stderr)
            return EXIT_USAGE
        status: int = arguments.run(arguments, root)
    except (ConfigError, CacheError) as error:
        print(f"mlx-isolate: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"mlx-isolate: {error.filename or root}: {error.strerror}.", file=sys.stderr)
        return EXIT_USAGE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mlx-isolate cache", description=_DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="VERB", required=True)

    def add(name: str, run: Callable[[argparse.Namespace, Path], int], help: str) -> Any:
        command = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        command.add_argument("--dir", metavar="FOLDER", help=_FOLDER_HELP)
        # For the help alone: `mlx-isolate cache` reads the file and hands its folder on as --dir.
        command.add_argument("--config", metavar="FILE", help=_FILE_HELP)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run, parser=command)
        return command

    add("ls", _list, "list entries, the most recently used first")
    add("verify", _verify, "check every file wholly, tensor data too; changes nothing")
    prune = add("prune", _prune, "remove damaged files, what dead writers left, and the oldest")
    prune.add_argument(
        "--max-gb", type=float, metavar="GB", help="evict the least recently used above this"
    )
    prune.add_argument(
        "--older-than", type=float, metavar="DAYS", help="evict what was not used for so long"
    )
    importing = add("import", _import, "take over a file made by mlx_lm.cache_prompt")
    importing.add_argument("file", metavar="FILE", help="the file")
    importing.add_argument(
        "--prompt-file", metavar="TEXT", required=True, help="file of the prompt it was made from"
    )
    importing.add_argument(
        "--model", metavar="FOLDER", help="the model's folder; default: what the file names"
    )
    importing.add_argument(
        "--id", metavar="NAME", help="the name that serve gives it; default: the folder's name"
    )
    for flag, metavar, type, default in (
        ("--adapter-path", "FOLDER", str, None),
        ("--kv-bits", "BITS", int, None),
        ("--kv-group-size", "N", int, 64),
        ("--quantized-kv-start", "N", int, 5000),
    ):
        importing.add_argument(
            flag,
            type=type,
            metavar=metavar,
            default=default,
            help="as it is served with" + (" (default %(default)s)" if default else ""),
        )
    importing.add_argument(
        "--max-gb", type=float, metavar="GB", help="evict the least recently used above this"
    )
    importing.add_argument("--trust-remote-code", action="store_true", help="run model code")
    return parser


def _finished(root: Path) -> list[OwnFile]:
    found = [f for f in CacheDirectory(root).files() if f.owner is None]
    return sorted(found, key=lambda f: -f.modified_ns)


def _describe(file: OwnFile, header: Header | None, damage: str | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "file": str(file.path),
        "bytes": file.bytes,
        "used": file.modified_ns / 1e9,
        "damage": damage,
    }
    if header is not None:
        facts = header.facts
        described |= {
            "model": facts.model_id,
            "namespace": facts.namespace,
            "fingerprint": facts.fingerprint,
            "tokens": facts.length,
            "kind": facts.kind,
            "created": facts.created,
            "classes": sorted(set(facts.classes)),
        }
    return described


def _inspect(file: OwnFile, check: Callable[[Path], Header]) -> dict[str, Any]:
    try:
        return _describe(file, check(file.path), None)
    except Damage as damage:
        return _describe(file, None, str(damage))


def _list(arguments: argparse.Namespace, root: Path) -> int:
    rows = [_inspect(f, read_header) for f in _finished(root) if not is_quarantined(f.path)]
    _print_rows(rows, as_json=arguments.json)
    return EXIT_OK


def _verify(arguments: argparse.Namespace, root: Path) -> int:
    rows = [_inspect(f, verify) for f in _finished(root) if not is_quarantined(f.path)]
    damaged = sum(row["damage"] is not None for row in rows)
    _print_rows(rows, as_json=arguments.json)
    if not arguments.json:
        print(f"every byte was checked: {len(rows) - damaged} whole, {damaged} damaged")
    return EXIT_DAMAGED if damaged else EXIT_OK


def _print_rows(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"entries": rows}))
        return
    now = time.time()
    print(f"{'MODEL':20} {'TOKENS':>8} {'MB':>9} {'USED':>8}  {'KIND':9} FILE")
    for row in rows:
        age = f"{max(0.0, now - row['used']) / 3600:.1f}h"
        name, tokens, kind = (str(row.get(key, "?")) for key in ("model", "tokens", "kind"))
        note = f"  DAMAGED ({row['damage']})" if row["damage"] else ""
        size = f"{row['bytes'] / 1e6:.1f}"
        print(f"{name[:20]:20} {tokens:>8} {size:>9} {age:>8}  {kind:9} {row['file']}{note}")
    total = sum(row["bytes"] for row in rows)
    print(f"{_counted(len(rows), 'entry', 'entries')}, {_size(total)}")


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _size(bytes: int) -> str:
    return f"{bytes / 1e9:.2f} GB" if bytes >= 1e9 else f"{bytes / 1e6:.1f} MB"


def _prune(arguments: argparse.Namespace, root: Path) -> int:
    directory = CacheDirectory(root)
    orphans = directory.remove_orphans()
    removed: list[Path] = []
    for file in _finished(root):
        is_old = (
            arguments.older_than is not None
            and file.modified_ns < time.time_ns() - arguments.older_than * 86400e9
        )
        is_damaged = is_quarantined(file.path) or _inspect(file, read_header)["damage"] is not None
        if (is_old or is_damaged) and directory.remove(file.path):
            removed.append(file.path)
    if arguments.max_gb is not None:
        removed += directory.make_room(0, int(arguments.max_gb * 1e9))[0]
    left = sum(file.bytes for file in directory.files())
    report = {"orphans": orphans, "removed": [str(path) for path in removed], "bytes_left": left}
    if arguments.json:
        print(json.dumps(report))
    else:
        files = _counted(len(removed), "file", "files")
        print(f"removed {files} and {orphans} unfinished; {_size(left)} left")
    return EXIT_OK


def _import(arguments: argparse.Namespace, root: Path) -> int:
    # mlx and the tokenizer libraries take seconds to import; nobody else here needs them.
    from mlx_isolate_engine.cache.importing import ImportRequest, import_file

    path = import_file(
        ImportRequest(
            file=Path(arguments.file),
            prompt=Path(arguments.prompt_file).read_text(),
            root=root,
            model=arguments.model,
            model_id=arguments.id,
            adapter_path=arguments.adapter_path,
            kv_bits=arguments.kv_bits,
            kv_group_size=arguments.kv_group_size,
            quantized_kv_start=arguments.quantized_kv_start,
            # The engines hold their cap by themselves; a guess at it could cost their entries.
            bytes_max=sys.maxsize if arguments.max_gb is None else int(arguments.max_gb * 1e9),
            trust_remote_code=arguments.trust_remote_code,
        )
    )
    file = next(f for f in CacheDirectory(root).files(path.parent) if f.path == path)
    _print_rows([_inspect(file, read_header)], as_json=arguments.json)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
