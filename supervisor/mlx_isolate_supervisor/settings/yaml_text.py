"""Reading of YAML text, with the checks that its library leaves out."""

from typing import Any

import yaml

from mlx_isolate_shared.errors import ConfigError

# A configuration is a page or two; without a bound a wrong path (a weight file) fills the memory.
TEXT_BYTES_MAX = 256 * 1024


class _Loader(yaml.SafeLoader):
    """The safe loader, except that a repeated key and an alias are errors.

    Aliases let a small text stand for a huge one, and nobody needs them here.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases."""
        if self.check_event(yaml.AliasEvent):
            mark = self.get_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not supported"
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that was there before."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


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
