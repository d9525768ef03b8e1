"""Macros of the configuration file: `${name}`, `${env.NAME}` and `${MODEL_ID}`; pure."""

import re
from collections.abc import Mapping
from typing import Any

from mlx_isolate_shared.errors import ConfigError

# Captures the name of a variable of the environment.
ENVIRONMENT_REFERENCE = re.compile(r"\$\{env\.([A-Za-z0-9_.-]+)\}")
_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
# All that macros may stand for in one file, characters; macros of macros double without end.
EXPANDED_MAX = 1 << 20
# Given per model.
MODEL_ID = "MODEL_ID"


class Macros:
    """Values by name; later macros may use earlier ones.

    Args:
        defined: the file's `macros`, in order.
        environment: for `${env.NAME}`.

    Raises:
        ConfigError: a bad name, a reference to what is not defined, or too much text in all.
    """

    def __init__(self, defined: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._room = EXPANDED_MAX
        self._values: dict[str, str] = {}
        for name, value in defined.items():
            if not _NAME.fullmatch(name) or name == MODEL_ID:
                raise ConfigError(f"macros.{name}: not a name that a macro may have.")
            if isinstance(value, (dict, list)):
                raise ConfigError(f"macros.{name}: a macro is text or a number.")
            self._values[name] = str(self.expand(value, f"macros.{name}"))

    def expand(self, value: Any, place: str, model_id: str | None = None) -> Any:
        """`value` with every reference in it replaced, however deep.

        Args:
            value: what YAML gave.
            place: its key path, for messages.
            model_id: what `${MODEL_ID}` stands for; None outside of models.
        """
        match value:
            case str():
                return self._expand_text(value, place, model_id)
            case list():
                items: list[Any] = value
                return [self.expand(item, place, model_id) for item in items]
            case dict():
                pairs: dict[Any, Any] = value
                return {
                    key: self.expand(item, f"{place}.{key}" if place else str(key), model_id)
                    for key, item in pairs.items()
                }
            case _:
                return value

    def _expand_text(self, text: str, place: str, model_id: str | None) -> str:
        def replace(match: re.Match[str]) -> str:
            name = match[1]
            if name == MODEL_ID and model_id is not None:
                return model_id
            if name.startswith("env."):
                found = self._environment.get(name.removeprefix("env."))
                reason = "is not set in the environment"
            else:
                found, reason = self._values.get(name), "is not defined under macros"
            if found is None:
                raise ConfigError(f"{place}: ${{{name}}} {reason}.")
            self._room -= len(found)
            if self._room < 0:
                raise ConfigError(f"{place}: the macros stand for too much text.")
            return found

        return _REFERENCE.sub(replace, text)
