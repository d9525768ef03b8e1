"""Ids of kept responses, which say whose engine keeps them, so that nobody has to remember."""

import hashlib
import re

_TAG_CHARS = 8
_ID = re.compile(r"resp_[0-9a-z]{1,64}")


def make_response_id(unique: str, model: str) -> str:
    """An id that ends with the mark of its model.

    Args:
        unique: lower-case letters and digits that no other answer has.
        model: the id that clients use.
    """
    return f"resp_{unique}{_tag(model)}"


def is_response_of(response_id: str, model: str) -> bool:
    """Whether an engine of `model` may have made it; false for what was never an id."""
    return _ID.fullmatch(response_id) is not None and response_id.endswith(_tag(model))


def _tag(model: str) -> str:
    return hashlib.sha256(model.encode()).hexdigest()[:_TAG_CHARS]
