"""Chat requests as the protocol reads them."""

import json
from typing import Any

from mlx_isolate_engine.completion.request import CompletionRequest
from mlx_isolate_engine.protocols import chat
from tests.fakes.scripted_service import CALL

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parse(**fields: Any) -> CompletionRequest:
    return parse_all(**fields).completions[0]


def parse_all(**fields: Any) -> chat.ChatRequest:
    return chat.parse(json.dumps({"messages": [USER], **fields}).encode(), CALL)
