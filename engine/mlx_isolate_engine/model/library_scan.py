"""Halves the time that importing transformers takes, most of which it reads its own sources.

To know which names its lazy modules have, transformers 5 reads every one of its two thousand
source files, twice (its memory of them is smaller than their number), and looks through each line
by line. An engine that follows a dead one has clients waiting for exactly that.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SCANNER = "transformers.utils.import_utils"
MARK = "\n__all__"


def speed_up_transformers() -> None:
    """Call before transformers is imported first; it changes nothing but the time.

    Where transformers is loaded already, or works otherwise than expected, nothing happens.
    """
    if SCANNER not in sys.modules and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Sees the module that scans on its way in, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != SCANNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_load, loader.exec_module)
        return spec


def _load(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    scanner: Any = module
    read_folder: Any = getattr(scanner, "create_import_structure_from_path", None)
    if not hasattr(scanner, "fetch__all__") or not hasattr(read_folder, "__wrapped__"):
        return
    scanner.fetch__all__ = functools.partial(_names, scanner.fetch__all__)
    # Its own memory with room for all folders, so that none is read twice.
    scanner.create_import_structure_from_path = functools.cache(read_folder.__wrapped__)


def _names(read: Callable[[str], list[str]], source: str) -> list[str]:
    return read(last_declaration(source))


def last_declaration(source: str) -> str:
    """The end of a source file from its last line that begins with `__all__`; all if none does."""
    return source[source.rfind(MARK) + 1 :]
