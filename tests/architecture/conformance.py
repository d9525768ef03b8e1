"""What each field of the official clients' requests and answers means here, for the docs page.

The fields come from the clients' own type definitions. A field that is not in a table is ignored,
and a test holds that it is; for a supported one the table names its test, for a refused one a value
that a test sends.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pydantic
from anthropic.types import Message, message_count_tokens_params, message_create_params
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import Response, response_create_params

from mlx_isolate_engine.completion.events import ContentDelta, ReasoningDelta, ToolCallDelta
from mlx_isolate_engine.protocols import anthropic as anthropic_protocol
from mlx_isolate_engine.protocols import chat, completions
from mlx_isolate_engine.protocols.contract import WireRequest
from mlx_isolate_engine.protocols.response_store import ResponseStore
from mlx_isolate_engine.protocols.responses import ResponsesProtocol
from mlx_isolate_engine.protocols.transcript import Transcript
from tests.fakes.scripted_service import CALL, summary

CHAT = "tests/unit/test_chat_protocol.py"
TEXT = "tests/unit/test_completions_protocol.py"
RESPONSES = "tests/unit/test_responses_protocol.py"
MESSAGES = "tests/unit/test_anthropic_protocol.py"
EDGES = "tests/integration/test_request_edges.py"
CLIENTS = "tests/e2e/test_official_clients.py"
_ROUTED = f"{EDGES}::test_model_field_is_not_looked_up"
_SAMPLER = f"{CHAT}::test_sampler_fields_arrive"


@dataclass(frozen=True)
class Api:
    """One API as its official client types it.

    Attributes:
        path: where it is served.
        minimal: the smallest request body.
        parse: the parser behind the path.
        requests: the client's types that name the request's fields.
        answers: the client's types of answers.
        supported: field to test.
        refused: field to a value that is answered with 400 naming the field.
    """

    name: str
    path: str
    minimal: dict[str, Any]
    parse: Callable[[bytes], WireRequest]
    requests: tuple[Any, ...]
    answers: tuple[type[pydantic.BaseModel], ...]
    supported: dict[str, str]
    refused: dict[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> list[str]:
        """Every field of a request, sorted."""
        return sorted({name for one in self.requests for name in one.__annotations__})

    @property
    def ignored(self) -> list[str]:
        """Fields that change nothing."""
        return [one for one in self.fields if one not in self.supported and one not in self.refused]

    def body(self, **fields: Any) -> bytes:
        """A minimal request with more fields."""
        return json.dumps({**self.minimal, **fields}).encode()


def answer(api: Api) -> dict[str, Any]:
    """The whole answer to a request that made the model think, speak and call a tool."""
    request = api.parse(api.body())
    transcript = Transcript()
    if api.path != "/v1/completions":
        transcript.add(ReasoningDelta(text="hm"))
        transcript.add(ToolCallDelta(index=0, id="call_a", name="f", arguments='{"x":1}'))
    transcript.add(ContentDelta(text="text"))
    transcript.end(summary())
    decoded: dict[str, Any] = json.loads(request.body([transcript]))
    return decoded


APIS = (
    Api(
        name="OpenAI chat completions",
        path="/v1/chat/completions",
        minimal={"messages": [{"role": "user", "content": "hi"}]},
        parse=lambda body: chat.parse(body, CALL),
        requests=(
            chat_params.CompletionCreateParamsBase,
            chat_params.CompletionCreateParamsStreaming,
        ),
        answers=(ChatCompletion, ChatCompletionChunk),
        supported={
            "frequency_penalty": _SAMPLER,
            "logit_bias": _SAMPLER,
            "logprobs": f"{CHAT}::test_logprobs_have_bytes_and_alternatives",
            "max_completion_tokens": f"{CHAT}::test_token_limit",
            "max_tokens": f"{CHAT}::test_token_limit",
            "messages": f"{CHAT}::test_replayed_tool_history_is_lenient",
            "modalities": f"{CHAT}::test_wrong_inner_value_is_refused_by_its_place",
            "model": _ROUTED,
            "n": f"{CHAT}::test_n_gives_each_choice_its_index",
            "presence_penalty": _SAMPLER,
            "reasoning_effort": f"{CHAT}::test_template_arguments_take_the_reasoning_effort",
            "response_format": f"{CHAT}::test_response_formats",
            "seed": f"{CHAT}::test_n_gives_each_choice_its_index",
            "stop": "tests/integration/test_engine_real.py::test_stop_string_never_shows_in_part",
            "stream": f"{CHAT}::test_stream_is_byte_for_byte_as_documented",
            "stream_options": f"{CHAT}::test_usage_chunk_has_no_choices_and_comes_last",
            "temperature": _SAMPLER,
            "tool_choice": f"{CHAT}::test_tools_arrive_in_template_form",
            "tools": f"{CLIENTS}::test_openai_stream_helper_accumulates_tool_calls",
            "top_logprobs": f"{CHAT}::test_logprobs_have_bytes_and_alternatives",
            "top_p": _SAMPLER,
        },
        refused={
            "audio": {"voice": "alloy", "format": "wav"},
            "function_call": "auto",
            "functions": [{"name": "f"}],
            "web_search_options": {},
        },
    ),
    Api(
        name="OpenAI completions",
        path="/v1/completions",
        minimal={"prompt": "hi"},
        parse=lambda body: completions.parse(body, CALL),
        requests=(
            completion_create_params.CompletionCreateParamsBase,
            completion_create_params.CompletionCreateParamsStreaming,
        ),
        answers=(Completion,),
        supported={
            "echo": f"{TEXT}::test_prompts_times_choices_are_indexed_and_counted_once_each",
            "frequency_penalty": _SAMPLER,
            "logit_bias": _SAMPLER,
            "logprobs": f"{TEXT}::test_logprobs_in_the_old_shape",
            "max_tokens": f"{CHAT}::test_token_limit",
            "model": _ROUTED,
            "n": f"{TEXT}::test_prompts_times_choices_are_indexed_and_counted_once_each",
            "presence_penalty": _SAMPLER,
            "prompt": f"{TEXT}::test_prompts",
            "seed": _SAMPLER,
            "stop": "tests/integration/test_engine_real.py::test_stop_string_never_shows_in_part",
            "stream": f"{TEXT}::test_stream_is_byte_for_byte_as_documented",
            "stream_options": f"{CHAT}::test_usage_chunk_has_no_choices_and_comes_last",
            "temperature": _SAMPLER,
            "top_p": _SAMPLER,
        },
        refused={"best_of": 2, "suffix": "s"},
    ),
    Api(
        name="OpenAI responses",
        path="/v1/responses",
        minimal={"input": "hi"},
        parse=lambda body: ResponsesProtocol(ResponseStore()).parse(body, CALL),
        requests=(
            response_create_params.ResponseCreateParamsBase,
            response_create_params.ResponseCreateParamsStreaming,
        ),
        answers=(Response,),
        supported={
            "include": f"{RESPONSES}::test_logprobs_where_included",
            "input": f"{RESPONSES}::test_items_sent_back_make_the_same_conversation_as_the_kept_one",
            "instructions": f"{RESPONSES}::test_previous_response_is_continued_with_its_output_and"
            "_without_its_instructions",
            "max_output_tokens": f"{RESPONSES}::test_settings_arrive",
            "metadata": f"{RESPONSES}::test_metadata_comes_back",
            "model": _ROUTED,
            "previous_response_id": f"{CLIENTS}::test_openai_responses",
            "reasoning": f"{RESPONSES}::test_settings_arrive",
            "store": f"{RESPONSES}::test_response_that_is_not_kept_is_refused_clearly",
            "stream": f"{CLIENTS}::test_openai_responses_stream_with_tool",
            "temperature": f"{RESPONSES}::test_settings_arrive",
            "text": f"{RESPONSES}::test_settings_arrive",
            "tool_choice": f"{RESPONSES}::test_settings_arrive",
            "tools": f"{CLIENTS}::test_openai_responses_stream_with_tool",
            "top_logprobs": f"{RESPONSES}::test_logprobs_where_included",
            "top_p": _SAMPLER,
        },
        refused={"background": True, "conversation": "conv_1", "prompt": {"id": "pmpt_1"}},
    ),
    Api(
        name="Anthropic messages",
        path="/v1/messages",
        minimal={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
        parse=lambda body: anthropic_protocol.parse(body, CALL),
        requests=(
            message_create_params.MessageCreateParamsBase,
            message_create_params.MessageCreateParamsStreaming,
            message_count_tokens_params.MessageCountTokensParams,
        ),
        answers=(Message,),
        supported={
            "max_tokens": f"{MESSAGES}::test_wrong_value_is_refused_by_its_place",
            "messages": f"{MESSAGES}::test_conversation_with_tools_becomes_template_messages",
            "model": _ROUTED,
            "output_config": f"{MESSAGES}::test_settings_arrive",
            "stop_sequences": f"{CLIENTS}::test_anthropic_stop_sequence_count_and_errors",
            "stream": f"{CLIENTS}::test_anthropic_stream_with_tool",
            "system": f"{MESSAGES}::test_conversation_with_tools_becomes_template_messages",
            "thinking": f"{MESSAGES}::test_settings_arrive",
            "tool_choice": f"{MESSAGES}::test_settings_arrive",
            "tools": f"{CLIENTS}::test_anthropic_stream_with_tool",
        },
    ),
)


def page() -> str:
    """`docs/conformance.md`."""
    lines = [
        "# Conformance",
        "",
        (
            "Every field of the official clients' types "
            f"(openai {openai.__version__}, anthropic {anthropic.__version__}) and what it does here. "
            "Generated from `tests/architecture/conformance.py` by "
            "`python -m tests.architecture.generated`."
        ),
        "",
        (
            "*Ignored* fields change nothing, whatever they hold "
            "(`tests/unit/test_conformance.py::test_ignored_field_changes_nothing`). *Refused* ones "
            "are answered with 400 naming the field "
            "(`tests/unit/test_conformance.py::test_refused_field_is_named`). A field that is null "
            "counts as absent. Answers validate against the client's own models "
            "(`tests/unit/test_conformance.py::test_answer_is_what_the_client_types`)."
        ),
    ]
    for api in APIS:
        lines += ["", f"## {api.name}", "", f"`POST {api.path}`", ""]
        lines += ["| request field | here | test |", "| --- | --- | --- |"]
        for name in api.fields:
            if name in api.supported:
                lines.append(f"| `{name}` | supported | `{api.supported[name]}` |")
            else:
                lines.append(f"| `{name}` | {'refused' if name in api.refused else 'ignored'} | |")
        sent = answer(api)
        known = list(api.answers[0].model_fields)
        more = [name for name in sent if name not in known]
        lines += ["", "| answer field | here |", "| --- | --- |"]
        lines += [f"| `{name}` | {'filled' if name in sent else 'not sent'} |" for name in known]
        lines += [f"| `{name}` | filled, beyond the client's type |" for name in more]
    return "\n".join([*lines, ""])
