"""From a request's messages or text to prompt tokens; blocking, for a worker thread.

Owns chat templates and tokenization. Control tokens that stand literally in a user's or tool's
text stay text: they cannot forge a turn.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from jinja2.exceptions import TemplateError

from mlx_isolate_engine.completion.request import (
    RESERVED_TEMPLATE_ARGUMENTS,
    ChatPrompt,
    CompletionRequest,
    TextPrompt,
    TokensPrompt,
)
from mlx_isolate_engine.generation.plan import Checkpoint, PromptPlan
from mlx_isolate_engine.generation.ports import EntryKind
from mlx_isolate_shared.errors import RequestError

# Stands inside a literal control token while the template runs: a noncharacter, so that no
# text that means something holds it.
BREAK = "\ufdd0"
# What every chat request may ask for, and a renderer that is no template but Python may not know.
HINTS = frozenset({"reasoning_effort", "verbosity"})
# A prompt that ends in a think block: how far from the end its opening marker may lie, in tokens.
THINK_TAIL_TOKENS = 11
# With no template: a transcript that a base model goes on from (only on request).
DEFAULT_ROLE_NAMES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


class BuiltPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in tokens, and the state in which its answer begins.

    Attributes:
        goes_on: the answer is the rest of one that the prompt ends with.
    """

    plan: PromptPlan
    initial_state: str = "normal"
    is_chat: bool = False
    goes_on: bool = False


class PromptBuilder:
    """Builds prompts for one tokenizer; may be used by several threads at once.

    Args:
        tokenizer: mlx_lm's TokenizerWrapper.
        template_args: the engine's own template arguments; a request's go over them.
        use_default_template: a model without a template gets a plain transcript, not a refusal.
        context_length: of the model; a text that cannot fit is not tokenized.
        checkpoint_kinds: which ends to find, of system prompt and history (each renders and
            tokenizes its part once more).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_args: dict[str, Any],
        use_default_template: bool,
        context_length: int,
        checkpoint_kinds: frozenset[EntryKind],
    ) -> None:
        self._checkpoint_kinds = checkpoint_kinds
        self._tokenizer = tokenizer
        self._template_args = template_args
        self._use_default_template = use_default_template
        self._context_length = context_length
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._literals = LiteralTokens(tokenizer, backend) if backend is not None else None
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._token_chars_max = max(map(len, vocabulary), default=1)

    def build(self, request: CompletionRequest) -> BuiltPrompt:
        """The request's prompt.

        Raises:
            RequestError: 400; the template refuses the messages, or there is nothing to run.
        """
        match request.prompt:
            case ChatPrompt() as chat:
                return self._build_chat(request, chat)
            case TextPrompt(text=text, param=param):
                self._check_fits(text, param)
                tokens = self._encode(text, is_rendered=False, param=param)
                return BuiltPrompt(plan=PromptPlan(tokens=tokens))
            case TokensPrompt(tokens=given):
                return BuiltPrompt(plan=PromptPlan(tokens=list(given)))

    def _build_chat(self, request: CompletionRequest, chat: ChatPrompt) -> BuiltPrompt:
        messages = [_normalize(message) for message in chat.messages]
        if not messages:
            raise RequestError("messages must not be empty.", param=chat.param)
        tools = chat.tools if request.tool_choice.mode != "none" else ()
        arguments = self._arguments(chat)
        text = self._render(messages, tools, arguments, chat.param)
        self._check_fits(text, chat.param)
        tokens = self._encode(text, is_rendered=True, param=chat.param)
        # A family may begin its messages with a head; an answer that goes on is behind its own.
        goes_on = bool(arguments.get("continue_final_message"))
        state, tail = self._thinking(
            tokens,
            lambda: self._answer_begun(messages, tools, arguments, text),
            None if goes_on else self._tokenizer.response_initial_state,
        )
        checkpoints = self._checkpoints(messages, tools, arguments, text, tokens)
        if tail is not None:
            checkpoints.append(Checkpoint(end=tail, kind="prompt"))
        plan = PromptPlan(tokens=tokens, checkpoints=tuple(checkpoints))
        return BuiltPrompt(plan=plan, initial_state=state, is_chat=True, goes_on=goes_on)

    def _arguments(self, chat: ChatPrompt) -> dict[str, Any]:
        for name in chat.template_kwargs:
            if name in RESERVED_TEMPLATE_ARGUMENTS:
                raise RequestError(
                    f"chat_template_kwargs may not set {name}.", param="chat_template_kwargs"
                )
        return {"add_generation_prompt": True} | self._template_args | chat.template_kwargs

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        arguments: dict[str, Any],
        param: str = "messages",
    ) -> str:
        if not self._tokenizer.has_chat_template:
            if not self._use_default_template:
                raise RequestError(
                    "This model has no chat template: use /v1/completions, or start the server "
                    "with --chat-template or --use-default-chat-template.",
                    param=param,
                    code="no_chat_template",
                )
            return _default_transcript(
                messages, goes_on=bool(arguments.get("continue_final_message"))
            )
        if self._literals is not None:
            messages = [self._literals.protect(message) for message in messages]
        if arguments.get("continue_final_message"):
            arguments = arguments | {"add_generation_prompt": False}
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, **arguments
            )
        except RecursionError as error:
            raise RequestError(
                "The messages are nested too deeply for the chat template.", param=param
            ) from error
        except (
            TemplateError,
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            if isinstance(error, TypeError) and HINTS & arguments.keys():
                unasked = {name: arguments[name] for name in arguments.keys() - HINTS}
                return self._render(messages, tools, unasked, param)
            reason = str(error).strip().split("\n")[0][:300] or "no reason given"
            raise RequestError(
                f"The model's chat template does not take these messages: {reason}",
                param=param,
                code="chat_template_error",
            ) from error
        return str(rendered)

    def _encode(self, text: str, *, is_rendered: bool, param: str) -> list[int]:
        try:
            if is_rendered and self._tokenizer.has_chat_template:
                if self._literals is not None:
                    return self._literals.encode(text)
                return list(self._tokenizer.encode(text, add_special_tokens=False))
            return list(self._tokenizer.encode(text))
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("The text is not valid Unicode.", param=param) from error

    def _check_fits(self, text: str, param: str) -> None:
        """Refuse what cannot fit without spending seconds on tokenizing it."""
        least = len(text) // self._token_chars_max
        if least > self._context_length:
            raise context_length_exceeded(least, self._context_length, param, at_least=True)

    def _thinking(
        self, tokens: list[int], answer_begun: Callable[[], str], initial: str | None
    ) -> tuple[str, int | None]:
        """The state in which the answer begins, and where a think block at the end opens."""
        state = "normal" if initial is None else initial
        if not self._tokenizer.has_thinking:
            return state, None
        opens = self._tokenizer.rfind_think_start(tokens)
        if opens > self._tokenizer.rfind_think_end(tokens) and initial is None:
            # Not so where a message does no more than name the marker: then all of the answer
            # would be taken for reasoning.
            answer = answer_begun()
            start, end = self._tokenizer.think_start, self._tokenizer.think_end
            if answer.rfind(start) > answer.rfind(end):
                state = "reasoning"
        is_tail = 0 < opens and opens >= len(tokens) - THINK_TAIL_TOKENS
        return state, opens if is_tail else None

    def _answer_begun(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        arguments: dict[str, Any],
        text: str,
    ) -> str:
        """The end of `text` that is the answer's and no other message's; all where unknown."""
        arguments = dict(arguments)
        if arguments.pop("continue_final_message", False):
            messages = [*messages[:-1], messages[-1] | {"content": ""}]
        try:
            before = self._render(messages, tools, arguments | {"add_generation_prompt": False})
        except RequestError:
            return text
        shared = len(before) if text.startswith(before) else _shared_length(text, before)
        if shared == len(text):  # the template opens the answer without being asked
            return text
        # A marker may begin like what ends a turn, and lie on both sides of the boundary.
        return text[max(0, shared - len(self._tokenizer.think_start) + 1) :]

    def _checkpoints(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        arguments: dict[str, Any],
        text: str,
        tokens: list[int],
    ) -> list[Checkpoint]:
        """Ends of the system prompt and of the turns before the last message, where they show.

        The start of the conversation is rendered with another last message; what its text shares
        with the whole is what every conversation with that start shares.
        """
        system = next((i for i, m in enumerate(messages) if m.get("role") != "system"), 0)
        last = len(messages) - 1
        found: list[Checkpoint] = []
        if not self._tokenizer.has_chat_template:
            return found
        places: tuple[tuple[int, EntryKind], ...] = ((system, "system"), (last, "history"))
        for count, kind in places:
            if kind not in self._checkpoint_kinds or count <= (system if kind == "history" else 0):
                continue
            start = [*messages[:count], {"role": messages[count].get("role"), "content": ""}]
            try:
                shorter = self._render(start, tools, arguments | {"add_generation_prompt": False})
            except RequestError:
                continue  # The template does not take that start by itself.
            shared = _shared_length(text, shorter)
            # Tokens may reach over the boundary: only those that both agree on count.
            part = self._encode(text[:shared], is_rendered=True, param="messages")
            end = _shared_length(part, tokens)
            if found and end <= found[-1].end:
                continue
            if 0 < end < len(tokens):
                found.append(Checkpoint(end=end, kind="system" if kind == "system" else "history"))
        return found


class LiteralTokens:
    """Keeps control tokens that stand literally in a message's text from becoming control tokens.

    They are broken up before the template runs and mended after it, as plain text. The
    tokenizer's own switch for this (split_special_tokens) holds for a whole text, also for the
    template's part of it, and changes the tokenizer under other threads.

    Args:
        tokenizer: mlx_lm's TokenizerWrapper.
        backend: the `tokenizers` object behind it.
    """

    def __init__(self, tokenizer: Any, backend: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._texts = {
            each.content for each in added.values() if each.special and len(each.content) > 1
        }
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        self._first = {text[0] for text in self._texts}

    def protect(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its literal control tokens broken, unless the assistant wrote it."""
        content = message.get("content")
        if not isinstance(content, str) or message.get("role") == "assistant":
            return message
        clean = content.replace(BREAK, "")
        pieces: list[str] = []
        begin = 0
        for start, end in self._find(clean):
            pieces += [clean[begin : start + 1], BREAK, clean[start + 1 : end]]
            begin = end
        if not pieces and clean == content:
            return message
        return message | {"content": "".join([*pieces, clean[begin:]])}

    def encode(self, text: str) -> list[int]:
        """Tokens of a rendered text, its broken control tokens mended as plain text."""
        if BREAK not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        tokens: list[int] = []
        begin = 0
        position = text.find(BREAK)
        while position >= 0:
            start = position - 1
            end = self._end_of_token(text, position)
            tokens += self._tokenizer.encode(text[begin:start], add_special_tokens=False)
            tokens += self._encode_plain(text[start:position] + text[position + 1 : end])
            begin = end
            position = text.find(BREAK, begin)
        return tokens + list(self._tokenizer.encode(text[begin:], add_special_tokens=False))

    def _find(self, text: str) -> Iterator[tuple[int, int]]:
        position = 0
        while position < len(text):
            if text[position] in self._first:
                for length in self._lengths:
                    if text[position : position + length] in self._texts:
                        yield position, position + length
                        position += length - 1
                        break
            position += 1

    def _end_of_token(self, text: str, mark: int) -> int:
        """Where the control token that `mark` breaks ends (templates may have cut it)."""
        for length in self._lengths:
            if text[mark - 1] + text[mark + 1 : mark + length] in self._texts:
                return mark + length
        return mark + 1

    def _encode_plain(self, text: str) -> list[int]:
        """Tokens of `text` from the model's vocabulary alone, without added tokens."""
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        pieces = [text]
        if backend.pre_tokenizer is not None:
            pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for piece in pieces for token in backend.model.tokenize(piece)]


def context_length_exceeded(
    tokens: int, context_length: int, param: str, *, at_least: bool = False
) -> RequestError:
    """The refusal of a prompt that is too long, in the words that clients look for."""
    amount = f"at least {tokens}" if at_least else str(tokens)
    return RequestError(
        f"This model's maximum context length is {context_length} tokens, but the prompt has "
        f"{amount} tokens.",
        code="context_length_exceeded",
        param=param,
    )


def _normalize(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates take it: text instead of null, call arguments as objects."""
    message = dict(message)
    if message.get("content") is None:
        message["content"] = ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_normalize_call(call) for call in message["tool_calls"]]
    return message


def _normalize_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # A model's own malformed call, replayed: shown as it was.
    return call | {"function": function | {"arguments": arguments}}


def _default_transcript(messages: list[dict[str, Any]], *, goes_on: bool) -> str:
    lines = [
        f"{DEFAULT_ROLE_NAMES.get(str(m.get('role')), 'User')}: {m.get('content')}\n"
        for m in messages
    ]
    return "".join(lines).removesuffix("\n") if goes_on else "".join([*lines, "Assistant:"])


def _shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))
