"""Chat templates of the kinds that models ship: plain, strict ones, thinking, tool calling."""

from dataclasses import dataclass

_TURNS = """\
<|bos|>\
{%- for message in messages %}\
<|{{ message.role }}|>{{ message.content or '' }}<|end|>\
{%- endfor %}\
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

_NO_SYSTEM = """\
{%- if messages and messages[0].role == 'system' %}\
{{ raise_exception('System role not supported') }}\
{%- endif %}"""

_ALTERNATING = """\
{%- for message in messages %}\
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{%- endif %}\
{%- endfor %}"""

# Earlier turns lose their reasoning, as the templates of reasoning models do.
_THINKING = """\
<|bos|>\
{%- for message in messages %}\
{%- set content = message.content or '' %}\
{%- if message.role == 'assistant' and '</think>' in content and not keep_thinking %}\
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}\
{%- endif %}\
<|{{ message.role }}|>{{ content }}<|end|>\
{%- endfor %}\
{%- if add_generation_prompt %}<|assistant|>\
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}\
{%- elif open_thinking %}{{ '<think>\\n' }}{% endif %}\
{%- endif %}"""

_TOOLS = """\
<|bos|>\
{%- if tools %}<|system|>Tools:\
{%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}<|end|>{% endif %}\
{%- for message in messages %}\
<|{{ message.role }}|>{{ message.content or '' }}\
{%- for call in message.tool_calls or [] %}\
{%- set tool_call = call.function if call.function is defined else call %}\
{{ '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}\
{%- if tool_call.arguments is string %}{{ tool_call.arguments }}\
{%- else %}{{ tool_call.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}\
{%- endfor %}<|end|>\
{%- endfor %}\
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@dataclass(frozen=True)
class Template:
    """A chat template with the markers that its tokenizer has as single tokens."""

    text: str | None
    has_thinking: bool = False
    has_tools: bool = False


TEMPLATES = {
    # <|bos|>, then <|role|>content<|end|> for every turn, any roles in any order.
    "plain": Template(_TURNS),
    # No chat template at all.
    "none": Template(None),
    # Raises on a system message, as Gemma's and early Mistral's do.
    "no_system": Template(_NO_SYSTEM + _TURNS),
    # Raises unless user and assistant alternate, beginning with user.
    "alternating": Template(_ALTERNATING + _TURNS),
    # <think> markers; kwargs: enable_thinking (false closes the block in the prompt),
    # open_thinking (the prompt ends inside the block), keep_thinking (earlier turns keep theirs).
    "thinking": Template(_THINKING, has_thinking=True),
    # <tool_call> markers around JSON, as Qwen's; recognized by mlx-lm as `json_tools`.
    "tools": Template(_TOOLS, has_tools=True),
    # Not valid as a template: rendering fails with a syntax error.
    "broken": Template("{% for message in messages %}{{ message.content }"),
}
