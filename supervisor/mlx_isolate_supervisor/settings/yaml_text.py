"""Reading of YAML text, with the checks that its library leaves out."""

import math
from pathlib import Path
from typing import Any

import yaml

from mlx_isolate_shared.errors import ConfigError

# A configuration is a page or two; without a bound a wrong path (a weight file) fills the memory.
TEXT_BYTES_MAX = 256 * 1024


# Nothing here lies deeper; without a bound brackets in brackets take seconds to read.
DEPTH_MAX = 32
# No number here is longer; beyond some thousand digits Python refuses to write one down.
NUMBER_CHARACTERS_MAX = 40
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """The safe loader, except that a repeated key, an alias, and what has no end are errors.

    Aliases let a small text stand for a huge one, and nobody needs them here. So is what JSON
    cannot say, since all goes on as JSON; a date is the text that it is written as.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, and what is nested too deep."""
        if self.check_event(yaml.AliasEvent):
            mark = self.get_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not supported"
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        if self._depth == DEPTH_MAX:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "it is nested too deep", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_yaml_int(self, node: Any) -> int:
        """Refuse numbers without end."""
        if len(node.value) > NUMBER_CHARACTERS_MAX:
            problem = "the number is too long"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        number: int = super().construct_yaml_int(node)
        return number

    def construct_yaml_float(self, node: Any) -> float:
        """Refuse what is no number, which JSON would turn into nothing."""
        number: float = super().construct_yaml_float(node)
        if not math.isfinite(number):
            problem = f"{node.value} is no number here"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return number

    def construct_yaml_str(self, node: Any) -> str:
        """Refuse what no other program can be told."""
        text: str = self.construct_scalar(node)
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            problem = "the text holds something that is no character"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return text

    def construct_no_json(self, node: Any) -> None:
        """Refuse kinds of values that are YAML's alone."""
        problem = f"a {node.tag.removeprefix(_TAG)} is no value here"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that was there before, or that is none."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key_node.tag == _TAG + "null":
                problem = "a key is missing"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_constructor(_TAG + "int", _Loader.construct_yaml_int)
_Loader.add_constructor(_TAG + "float", _Loader.construct_yaml_float)
for _name in ("str", "timestamp"):
    _Loader.add_constructor(_TAG + _name, _Loader.construct_yaml_str)
for _name in ("binary", "omap", "pairs", "set"):
    _Loader.add_constructor(_TAG + _name, _Loader.construct_no_json)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a file holds.

    Raises:
        ConfigError: it cannot be read, is no text, or as `parse_yaml`.
    """
    try:
        with path.open("rb") as file:
            # No more than shows that it is too large.
            data = file.read(4 * TEXT_BYTES_MAX + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 text.") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, path: str) -> dict[str, Any]:
    """The mapping that `text` is; an empty text is an empty mapping.

    Raises:
        ConfigError: naming `path`, line and column.
    """
    if len(text) > TEXT_BYTES_MAX:
        raise ConfigError(f"{path} is too large for a configuration file.")
    try:
        value: object = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: {error.problem or 'not valid YAML'}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML.") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must be a mapping of keys to values.")
    found: dict[str, Any] = {str(key): item for key, item in value.items()}
    return found
