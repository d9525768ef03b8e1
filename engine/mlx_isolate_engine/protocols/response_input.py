"""The input items of a kept response, listed page by page in the form that answers have."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from mlx_isolate_engine.protocols.responses_request import InputItem, InputPart
from mlx_isolate_shared.errors import RequestError

# Items of a page, as OpenAI has it.
PAGE_ITEMS = 20
PAGE_ITEMS_MAX = 100
# Digits as `int` takes them at once: neither another script's nor thousands of them.
_LIMIT = re.compile(r"[0-9]{1,9}")


class ListedItem(Struct, frozen=True):
    """An item with its id, as JSON."""

    id: str
    json: Raw


class _Identified(Struct, frozen=True):
    id: str


class _Answer(Struct, frozen=True):
    output: list[Raw]


def listed_input(
    given: str | Sequence[InputItem], mark: str, before: Sequence[ListedItem]
) -> tuple[ListedItem, ...]:
    """The conversation that a request goes on from and what it adds, each item with an id of its own.

    Args:
        given: the request's input.
        mark: what no other response has, for the ids of items that come without one.
        before: items of the conversation so far.
    """
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    listed = list(before)
    taken = {item.id for item in before}
    for place, item in enumerate(items):
        item_id = item.id
        if not item_id or item_id in taken:
            item_id = f"{_PREFIXES.get(item.type or '', 'msg')}_{mark}_in{place}"
        taken.add(item_id)
        json = msgspec.json.encode({"id": item_id, **_answer_form(item)})
        listed.append(ListedItem(item_id, Raw(json)))
    return tuple(listed)


def listed_output(body: bytes) -> tuple[ListedItem, ...]:
    """The output items of a whole response.

    Args:
        body: the response as JSON.
    """
    return tuple(
        ListedItem(msgspec.json.decode(item, type=_Identified).id, Raw(bytes(item)))
        for item in msgspec.json.decode(body, type=_Answer).output
    )


def list_page(items: Sequence[ListedItem], query: Mapping[str, str]) -> bytes:
    """One page of a list, as JSON.

    Args:
        items: all items, the oldest first.
        query: `order` (the latest first unless it is `asc`), `limit`, `after` (an item's id).

    Raises:
        RequestError: 400 naming what of the query is wrong.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("Invalid value for 'order': expected 'asc' or 'desc'.", param="order")
    ordered = list(items if order == "asc" else reversed(items))
    start = _start(ordered, query.get("after"))
    page = ordered[start : start + _limit(query.get("limit"))]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [item.json for item in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": start + len(page) < len(ordered),
        }
    )


def _start(ordered: Sequence[ListedItem], after: str | None) -> int:
    if after is None:
        return 0
    for place, item in enumerate(ordered):
        if item.id == after:
            return place + 1
    raise RequestError("Invalid value for 'after': there is no item of that id.", param="after")


def _limit(text: str | None) -> int:
    if text is None:
        return PAGE_ITEMS
    if _LIMIT.fullmatch(text) is None or not 1 <= int(text) <= PAGE_ITEMS_MAX:
        raise RequestError(
            f"Invalid value for 'limit': expected a whole number from 1 to {PAGE_ITEMS_MAX}.",
            param="limit",
        )
    return int(text)


_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _answer_form(item: InputItem) -> dict[str, Any]:
    match item.type:
        case "function_call":
            called = {"call_id": item.call_id or "", "name": item.name, "status": "completed"}
            return {"type": item.type, **called, "arguments": item.arguments or ""}
        case "function_call_output":
            output = item.output
            told = output if isinstance(output, str) else _parts(output, "input_text")
            return {
                "type": item.type,
                "call_id": item.call_id,
                "status": "completed",
                "output": told or "",
            }
        case "reasoning":
            summary = _parts(item.summary, "summary_text")
            content = _parts(item.content, "reasoning_text")
            return {"type": item.type, "summary": summary, "content": content}
        case _:
            by_model = item.role == "assistant"
            content = _parts(item.content, "output_text" if by_model else "input_text")
            return {"type": "message", "role": item.role, "status": "completed", "content": content}


def _parts(content: str | Sequence[InputPart] | None, kind: str) -> list[dict[str, Any]]:
    if content is None:
        return []
    parts = [InputPart(text=content)] if isinstance(content, str) else content
    return [_part(part, kind) for part in parts]


def _part(part: InputPart, kind: str) -> dict[str, Any]:
    if part.type == "refusal" and kind == "output_text":
        return {"type": "refusal", "refusal": part.refusal}
    text = part.refusal if part.type == "refusal" else part.text
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}
