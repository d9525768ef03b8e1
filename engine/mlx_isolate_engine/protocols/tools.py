"""Tool declarations and tool_choice: from a request to what templates and the seam take."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from mlx_isolate_engine.completion.request import ToolChoice
from mlx_isolate_engine.protocols.fields import FreeForm
from mlx_isolate_engine.protocols.json_body import check_free_form
from mlx_isolate_shared.errors import RequestError

# Tools of one request; each is rendered into the prompt.
TOOLS_MAX = 1024
ToolName = Annotated[str, Meta(min_length=1, max_length=256)]


class DeclaredFunction(Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: FreeForm | None = None
    strict: bool | None = None


class DeclaredTool(Struct, frozen=True, kw_only=True):
    """A tool of a chat request."""

    type: str | None = None
    function: DeclaredFunction | None = None


class NamedFunction(Struct, frozen=True, kw_only=True):
    """The function that a tool_choice names."""

    name: str


class NamedTool(Struct, frozen=True, kw_only=True):
    """A tool_choice that names one function."""

    type: str | None = None
    function: NamedFunction | None = None


def template_tools(
    tools: Sequence[DeclaredTool] | None, param: str = "tools"
) -> tuple[dict[str, Any], ...]:
    """The tools as chat templates take them: OpenAI's nested form with parameters always there.

    Raises:
        RequestError: a tool that is no function, or parameters nested too deeply.
    """
    plain: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        place = f"{param}[{index}]"
        if tool.type not in (None, "function"):
            raise RequestError(
                f"Invalid value for '{place}.type': only 'function' tools can be used here.",
                param=f"{place}.type",
            )
        if tool.function is None:
            raise RequestError(f"'{place}.function' is required.", param=f"{place}.function")
        plain.append(template_tool(tool.function, f"{place}.function.parameters"))
    return tuple(plain)


def template_tool(function: DeclaredFunction, param: str) -> dict[str, Any]:
    """One function as chat templates take it; `param` is where its parameters lie.

    Raises:
        RequestError: the parameters are nested too deeply.
    """
    parameters = function.parameters
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    check_free_form(parameters, param)
    inner: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        inner["description"] = function.description
    inner["parameters"] = parameters
    if function.strict is not None:
        inner["strict"] = function.strict
    return {"type": "function", "function": inner}


def tool_choice(choice: str | NamedTool | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """The resolved tool choice; without tools only `auto` and `none` make sense.

    Raises:
        RequestError: an unknown mode, or a function that was not declared.
    """
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        return named_mode(choice, tools)
    if choice.type not in (None, "function") or choice.function is None:
        raise RequestError(
            "Invalid value for 'tool_choice': expected a mode or one function by name.",
            param="tool_choice",
        )
    return named_function(choice.function.name, tools)


def at_most_one(choice: ToolChoice, *, parallel: bool | None) -> ToolChoice:
    """The choice with what a request says of several calls in one answer; silent = any number."""
    if parallel is not False:
        return choice
    return structs.replace(choice, at_most_one=True)


def named_mode(mode: str, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """A tool choice by mode.

    Raises:
        RequestError: an unknown mode, or `required` without tools.
    """
    if mode not in ("auto", "none", "required"):
        raise RequestError(
            "Invalid value for 'tool_choice': expected 'auto', 'none', 'required' or a function.",
            param="tool_choice",
        )
    if mode == "required" and not tools:
        raise RequestError(
            "'tool_choice' asks for a tool and 'tools' has none.", param="tool_choice"
        )
    return ToolChoice(mode=mode)


def named_function(name: str, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """A tool choice that demands one function.

    Raises:
        RequestError: the function was not declared.
    """
    if all(tool["function"]["name"] != name for tool in tools):
        raise RequestError(
            "'tool_choice' names a function that 'tools' does not declare.", param="tool_choice"
        )
    return ToolChoice(mode="named", name=name)
