"""What each field of the official clients' requests and answers means here, for the docs page.

The fields come from the clients' own type definitions, and a test holds that every one is in a
table: a supported one with its test, a refused one with a value that a test sends, an ignored one
with the reason why nothing is lost by that.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pydantic
from anthropic.types import Message, message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
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
from tests.architecture.beyond import section
from tests.fakes.scripted_service import CALL, summary

CHAT = "tests/unit/test_chat_requests.py"
CHAT_ANSWERS = "tests/unit/test_chat_answers.py"
TEXT = "tests/unit/test_completions_protocol.py"
RESPONSES = "tests/unit/test_responses_protocol.py"
MESSAGES = "tests/unit/test_anthropic_protocol.py"
EDGES = "tests/integration/test_request_edges.py"
CALLS = "tests/unit/test_call_stream.py"
CLIENTS = "tests/e2e/test_official_clients.py"
# What a tool is promised that is declared strict.
STRICT = (
    "holds calls to the schema, or 400; where the model's calls are no JSON between markers, the "
    "answer's `x-mlx-isolate-warning` says that it does not"
)
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
        ignored: field that changes nothing to why no answer is another one for it.
        inside: what of a supported field is not obvious, by its place.
    """

    name: str
    path: str
    minimal: dict[str, Any]
    parse: Callable[[bytes], WireRequest]
    requests: tuple[Any, ...]
    answers: tuple[type[pydantic.BaseModel], ...]
    supported: dict[str, str]
    ignored: dict[str, str]
    inside: dict[str, str]
    refused: dict[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> list[str]:
        """Every field of a request, sorted."""
        return sorted({name for one in self.requests for name in one.__annotations__})

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


_LABEL = "a label for the provider's own records"
_CACHE = "prefixes are found in the prompt cache by themselves"
_TIER = "there is one class of service"
_FITS = "a conversation that fits the context is seen whole, one that does not is 400"
_OBFUSCATION = "ignored: adds nothing but padding to a stream"
_LIMIT = "at least 1; -1 means no limit but the context, which caps any other"
_TEMPLATE = "handed to the chat template; changes something where that names it"

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
            "logprobs": f"{CHAT_ANSWERS}::test_logprobs_have_bytes_and_alternatives",
            "max_completion_tokens": f"{CHAT}::test_token_limit",
            "max_tokens": f"{CHAT}::test_token_limit",
            "messages": f"{CHAT}::test_replayed_tool_history_is_lenient",
            "modalities": f"{CHAT}::test_wrong_inner_value_is_refused_by_its_place",
            "model": _ROUTED,
            "n": f"{CHAT_ANSWERS}::test_n_gives_each_choice_its_index",
            "parallel_tool_calls": f"{CALLS}::test_where_one_call_is_allowed_no_other_is_given_out",
            "presence_penalty": _SAMPLER,
            "reasoning_effort": f"{CHAT}::test_template_arguments_take_effort_and_verbosity",
            "response_format": f"{CHAT}::test_response_formats",
            "seed": f"{CHAT_ANSWERS}::test_n_gives_each_choice_its_index",
            "stop": "tests/integration/test_engine_real.py::test_stop_string_never_shows_in_part",
            "stream": f"{CHAT_ANSWERS}::test_stream_is_byte_for_byte_as_documented",
            "stream_options": f"{CHAT_ANSWERS}::test_usage_chunk_has_no_choices_and_comes_last",
            "temperature": _SAMPLER,
            "tool_choice": f"{CHAT}::test_tools_arrive_in_template_form",
            "tools": f"{CLIENTS}::test_openai_stream_helper_accumulates_tool_calls",
            "top_logprobs": f"{CHAT_ANSWERS}::test_logprobs_have_bytes_and_alternatives",
            "top_p": _SAMPLER,
            "verbosity": f"{CHAT}::test_template_arguments_take_effort_and_verbosity",
        },
        ignored={
            "metadata": _LABEL,
            "moderation": "nothing is moderated",
            "prediction": "would change the speed alone",
            "prompt_cache_key": _CACHE,
            "prompt_cache_options": _CACHE,
            "prompt_cache_retention": _CACHE,
            "safety_identifier": _LABEL,
            "service_tier": _TIER,
            "store": "no chat completion is kept; `/v1/chat/completions/{id}` is 404",
            "user": _LABEL,
        },
        inside={
            "max_completion_tokens": _LIMIT,
            "max_tokens": f"{_LIMIT}; counts where `max_completion_tokens` is absent",
            "messages[].audio": "refused",
            "messages[].function_call": "refused",
            "messages[].refusal": "stands for the content where there is none",
            "reasoning_effort": _TEMPLATE,
            "stream_options.include_obfuscation": _OBFUSCATION,
            "tools[].function.strict": STRICT,
            "tools[].type": "function; others are refused",
            "verbosity": _TEMPLATE,
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
            "stream_options": f"{CHAT_ANSWERS}::test_usage_chunk_has_no_choices_and_comes_last",
            "temperature": _SAMPLER,
            "top_p": _SAMPLER,
        },
        ignored={"user": _LABEL},
        inside={
            "best_of": "taken where it equals `n`",
            "max_tokens": _LIMIT,
            "stream_options.include_obfuscation": _OBFUSCATION,
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
            "metadata": f"{RESPONSES}::test_what_was_asked_comes_back",
            "model": _ROUTED,
            "parallel_tool_calls": f"{RESPONSES}::test_settings_arrive",
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
        ignored={
            "access_programs": "a matter of the provider's accounts",
            "background_options": "`background` is refused",
            "context_management": _FITS,
            "image": "this model takes no images",
            "max_tool_calls": "counts built-in tools, and those are refused",
            "moderation": "nothing is moderated",
            "prompt_cache_key": _CACHE,
            "prompt_cache_options": _CACHE,
            "prompt_cache_retention": _CACHE,
            "safety_identifier": _LABEL,
            "service_tier": _TIER,
            "stream_options": "its `include_obfuscation` adds nothing but padding to a stream",
            "truncation": f"{_FITS}; answers say `disabled`",
            "user": _LABEL,
        },
        inside={
            "include[]": "`message.output_text.logprobs`; the others name what is always sent "
            "(reasoning comes as text, never encrypted) or belongs to tools that are refused",
            "max_output_tokens": _LIMIT,
            "reasoning.effort": _TEMPLATE,
            "reasoning.summary": "ignored: reasoning comes whole, and `summary` is empty",
            "text.verbosity": _TEMPLATE,
            "tools[].strict": f"{STRICT}; false unless it is sent",
            "tools[].type": "function; others are refused",
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
            beta_params.MessageCreateParamsBase,
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
        ignored={
            "betas": "a header that unlocks fields, which are listed here one by one",
            "billing_policy": _LABEL,
            "cache_control": _CACHE,
            "context_management": _FITS,
            "diagnostics": "asks for figures beside the answer",
            "fallback_credit_token": _LABEL,
            "fallbacks": "nothing is declined for reasons of policy",
            "inference_geo": "it runs here",
            "metadata": _LABEL,
            "service_tier": _TIER,
            "speed": _TIER,
            "user_profile_id": _LABEL,
            "workspace_id": _LABEL,
        },
        inside={
            "max_tokens": _LIMIT,
            "messages[].content[].cache_control": f"ignored: {_CACHE}",
            "messages[].content[].is_error": "ignored: chat templates have no place for it; say it "
            "in the content",
            "output_config.effort": _TEMPLATE,
            "output_config.task_budget": "ignored: the model is not told of it",
            "thinking.budget_tokens": "ignored: a target for the provider's own models, and not a "
            "limit there either",
            "thinking.display": "`omitted` leaves the text of thinking blocks empty",
            "tool_choice.disable_parallel_tool_use": "the answer ends with its first call",
            "tools[].defer_loading": "ignored: every tool is declared from the start",
            "tools[].input_examples": "ignored: chat templates have no place for them",
            "tools[].strict": STRICT,
            "tools[].type": "custom; others are refused",
        },
        refused={
            "compaction": {"type": "summarize"},
            "container": "container_1",
            "mcp_servers": [{"type": "url", "name": "n", "url": "https://example.com"}],
            "thread": {"type": "create"},
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
            "*Ignored* fields change nothing, whatever they hold, and no answer is another one for "
            "that: the reason stands beside them "
            "(`tests/unit/test_conformance.py::test_ignored_field_changes_nothing`). *Refused* ones "
            "are answered with 400 naming the field "
            "(`tests/unit/test_conformance.py::test_refused_field_is_named`). A field that is null "
            "counts as absent. Answers validate against the client's own models "
            "(`tests/unit/test_conformance.py::test_answer_is_what_the_client_types`). "
            "`GET /openapi.json` describes every field to a program."
        ),
    ]
    for api in APIS:
        lines += ["", f"## {api.name}", "", f"`POST {api.path}`", ""]
        lines += ["| request field | here | test |", "| --- | --- | --- |"]
        for name in api.fields:
            if name in api.supported:
                lines.append(f"| `{name}` | supported | `{api.supported[name]}` |")
            elif name in api.refused:
                lines.append(f"| `{name}` | refused | |")
            else:
                lines.append(f"| `{name}` | ignored: {api.ignored[name]} | |")
        lines += ["", "| inside | here |", "| --- | --- |"]
        lines += [f"| `{place}` | {what} |" for place, what in sorted(api.inside.items())]
        sent = answer(api)
        known = list(api.answers[0].model_fields)
        more = [name for name in sent if name not in known]
        lines += ["", "| answer field | here |", "| --- | --- |"]
        lines += [f"| `{name}` | {'filled' if name in sent else 'not sent'} |" for name in known]
        lines += [f"| `{name}` | filled, beyond the client's type |" for name in more]
    lines += ["", *section({api.path: api.fields for api in APIS})]
    return "\n".join([*lines, ""])
