"""OpenAI responses: the answer as output items, whole or as named events.

A response is kept for `previous_response_id` unless the request says `store: false`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
)
from mlx_isolate_engine.completion.request import ChatPrompt, CompletionRequest
from mlx_isolate_engine.protocols import openai_shapes as shapes
from mlx_isolate_engine.protocols.contract import Call, Delta
from mlx_isolate_engine.protocols.fields import (
    LaneBody,
    SamplingBody,
    template_arguments,
    token_limit,
)
from mlx_isolate_engine.protocols.json_body import decode_body
from mlx_isolate_engine.protocols.response_input import (
    ListedItem,
    listed_input,
    listed_output,
)
from mlx_isolate_engine.protocols.response_items import (
    CallItem,
    MessageItem,
    OpenItem,
    ReasoningItem,
    template_turn,
)
from mlx_isolate_engine.protocols.response_store import KeptResponse, ResponseStore
from mlx_isolate_engine.protocols.responses_request import (
    ResponsesBody,
    response_tool_choice,
    response_tools,
    template_input,
    text_format,
)
from mlx_isolate_engine.protocols.tools import at_most_one
from mlx_isolate_engine.protocols.transcript import Text, ToolCall, Transcript
from mlx_isolate_shared.errors import HttpError, RequestError
from mlx_isolate_shared.response_id import make_response_id

_LOGPROBS = "message.output_text.logprobs"


class ResponsesProtocol:
    """Parses responses requests that may continue what the store holds."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def parse(self, body: bytes, call: Call) -> "ResponsesRequest":
        """Parse a request body.

        Raises:
            RequestError: 400 naming the field; 404 where the response to continue is not kept.
        """
        asked = decode_body(body, ResponsesBody)
        sampling = decode_body(body, SamplingBody)
        lane = decode_body(body, LaneBody)
        _refuse_what_is_not_kept(asked)
        before = self._before(asked.previous_response_id)
        conversation = template_input(asked.input, before.messages if before is not None else ())
        instructions: tuple[dict[str, Any], ...] = ()
        if asked.instructions:
            instructions = ({"role": "system", "content": asked.instructions},)
        tools = response_tools(asked.tools)
        arguments = template_arguments(
            asked.chat_template_kwargs,
            effort=asked.reasoning.effort if asked.reasoning is not None else None,
            verbosity=asked.text.verbosity if asked.text is not None else None,
        )
        request = CompletionRequest(
            request_id=call.request_id,
            prompt=ChatPrompt(
                messages=instructions + conversation,
                tools=tools,
                template_kwargs=arguments,
                param="input",
            ),
            max_tokens=token_limit(asked.max_output_tokens, "max_output_tokens"),
            sampling=sampling.request(),
            top_logprobs=_top_logprobs(asked),
            response_format=text_format(asked.text),
            tool_choice=at_most_one(
                response_tool_choice(asked.tool_choice, tools), parallel=asked.parallel_tool_calls
            ),
            stream=bool(asked.stream),
            adapter=lane.adapters,
            draft_model=lane.draft_model,
            num_draft_tokens=lane.num_draft_tokens,
        )
        head = _head(asked, sampling, call, lane.adapters)
        # Later, and so never for a request that is refused: of many items it takes long.
        listed = functools.partial(_listed, asked, head["id"], before)
        return ResponsesRequest(
            request, head, conversation, listed, self._store, stream=bool(asked.stream)
        )

    def _before(self, response_id: str | None) -> KeptResponse | None:
        if response_id is None:
            return None
        kept = self._store.get(response_id)
        if kept is None:
            raise RequestError(
                "The response that 'previous_response_id' names is not kept here (any more); send "
                "the conversation in 'input'.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept


def _listed(
    asked: ResponsesBody, response_id: str, before: KeptResponse | None
) -> tuple[ListedItem, ...]:
    """What the response is made of: of the one before its input and output too."""
    earlier = () if before is None else (*before.items, *listed_output(before.body))
    return listed_input(asked.input or "", response_id.removeprefix("resp_"), earlier)


def _refuse_what_is_not_kept(asked: ResponsesBody) -> None:
    for name in ("conversation", "prompt"):
        if getattr(asked, name) is not None:
            raise RequestError(f"'{name}' is not kept by this server; use 'input'.", param=name)
    if asked.background:
        raise RequestError("Responses cannot run in the background here.", param="background")


def _top_logprobs(asked: ResponsesBody) -> int | None:
    if _LOGPROBS in (asked.include or ()) or asked.top_logprobs:
        return asked.top_logprobs or 0
    return None


def _head(
    asked: ResponsesBody, sampling: SamplingBody, call: Call, adapter: str | None
) -> dict[str, Any]:
    """What a response repeats of its request, in every event that holds it."""
    builtins = msgspec.to_builtins
    form = asked.text.format if asked.text is not None else None
    return {
        "id": make_response_id(call.unique, call.identity.model),
        "object": "response",
        "created_at": call.created,
        "model": call.identity.model,
        "system_fingerprint": call.identity.fingerprint_with(adapter),
        "error": None,
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {
            "effort": asked.reasoning.effort if asked.reasoning is not None else None,
            "summary": None,
        },
        "store": asked.store is not False,
        "temperature": sampling.temperature,
        "text": {
            "format": {"type": "text"} if form is None else builtins(form),
            "verbosity": asked.text.verbosity if asked.text is not None else None,
        },
        "tool_choice": "auto" if asked.tool_choice is None else builtins(asked.tool_choice),
        "tools": [builtins(tool) for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


class ResponsesRequest:
    """A parsed responses request with its two formatters.

    Args:
        listed: makes what the response is made of, in the form in which that is listed.
    """

    def __init__(
        self,
        request: CompletionRequest,
        head: dict[str, Any],
        conversation: tuple[dict[str, Any], ...],
        listed: Callable[[], tuple[ListedItem, ...]],
        store: ResponseStore,
        *,
        stream: bool,
    ) -> None:
        self.completions = (request,)
        self.stream = stream
        self._head = head
        self._conversation = conversation
        self._listed = listed
        self._store = store

    @property
    def head(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        return self._head

    def streamer(self) -> "ResponseStreamer":
        """A formatter for the streamed answer."""
        return ResponseStreamer(self)

    def body(self, transcripts: Sequence[Transcript]) -> bytes:
        """The whole answer as JSON."""
        (transcript,) = transcripts
        streamer = self.streamer()
        for index, part in enumerate(transcript.parts):
            match part:
                case ToolCall(id=id, name=name, arguments=arguments):
                    delta = ToolCallDelta(index=index, id=id, name=name, arguments=arguments)
                    streamer.add(delta)
                case Text(is_reasoning=True, text=text):
                    streamer.add(ReasoningDelta(text=text))
                case Text(text=text, logprobs=logprobs):
                    streamer.add(ContentDelta(text=text, logprobs=tuple(logprobs)))
        return msgspec.json.encode(streamer.ended(transcript.summary))

    def keep(self, response: dict[str, Any], items: Sequence[OpenItem]) -> None:
        """Keep an ended response with its conversation, unless the request forbids it."""
        if self._head["store"]:
            turn = template_turn(items)
            messages = (*self._conversation, *turn)
            body = msgspec.json.encode(response)
            self._store.put(response["id"], body, messages, self._listed())


def _usage(summary: CompletionSummary) -> dict[str, Any]:
    return {
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": summary.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": summary.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": summary.reasoning_tokens},
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    }


def _status(summary: CompletionSummary) -> str:
    return "incomplete" if summary.finish_reason == "length" else "completed"


class ResponseStreamer:
    """Named, numbered events: the response, and its items one after the other."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self._items: list[OpenItem] = []
        self._sequence = 0

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        """The response before it has any output."""
        response = {
            **self._request.head,
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        yield self._event("response.created", {"response": response})
        yield self._event("response.in_progress", {"response": response})

    def delta(self, index: int, delta: Delta) -> Iterable[bytes]:
        """A delta of the open item, after what opens another one where that is due."""
        for name, fields in self.add(delta):
            yield self._event(name, fields)

    def finish(self, index: int, summary: CompletionSummary) -> Iterable[bytes]:
        """The end of the last item and of the response."""
        if self._items:
            for name, fields in self._items[-1].done(_status(summary)):
                yield self._event(name, fields)
        response = self.ended(summary)
        yield self._event(f"response.{response['status']}", {"response": response})

    def end(self) -> Iterable[bytes]:
        """Nothing: the response's own end is the last event."""
        return ()

    def error(self, error: HttpError) -> bytes:
        """An error event in this API's form, with the envelope that its clients raise on."""
        envelope = error.envelope()
        inner = envelope["error"]
        fields = {"code": inner["code"], "message": inner["message"], "param": inner["param"]}
        return self._event("error", {**fields, **envelope})

    def keepalive(self, done: int, total: int) -> bytes:
        """A comment."""
        return shapes.comment_keepalive(done, total)

    def add(self, delta: Delta) -> list[tuple[str, dict[str, Any]]]:
        """Take a delta; gives the names and fields of the events that tell it."""
        events: list[tuple[str, dict[str, Any]]] = []
        item = self._items[-1] if self._items else None
        if item is None or not item.takes(delta):
            if item is not None:
                events += item.done("completed")
            item = self._new_item(delta)
            self._items.append(item)
            events += item.added()
        return events + item.delta(delta)

    def ended(self, summary: CompletionSummary) -> dict[str, Any]:
        """The whole response, which is also kept for later."""
        status = _status(summary)
        reason = None if status == "completed" else {"reason": "max_output_tokens"}
        output = [item.whole("completed") for item in self._items[:-1]]
        output += [item.whole(status) for item in self._items[-1:]]
        response = {
            **self._request.head,
            "status": status,
            "incomplete_details": reason,
            "output": output,
            "usage": _usage(summary),
            "timings": msgspec.to_builtins(summary.timings),
        }
        self._request.keep(response, self._items)
        return response

    def _new_item(self, delta: Delta) -> OpenItem:
        place = len(self._items)
        suffix = f"{self._request.head['id'].removeprefix('resp_')}_{place}"
        match delta:
            case ContentDelta():
                with_logprobs = self._request.completions[0].top_logprobs is not None
                return MessageItem(f"msg_{suffix}", place, with_logprobs=with_logprobs)
            case ReasoningDelta():
                return ReasoningItem(f"rs_{suffix}", place)
            case ToolCallDelta():
                return CallItem(f"fc_{suffix}", place, delta)

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        payload = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(payload))
