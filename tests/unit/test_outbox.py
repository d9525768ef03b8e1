"""What unread events count for, so that a stalled reader's share stays bounded."""

from mlx_isolate_engine.completion.events import ContentDelta, TokenLogprob
from mlx_isolate_engine.generation.outbox import EVENT_BYTES, LOGPROB_BYTES, weigh


def test_alternatives_of_a_token_count_for_what_they_hold() -> None:
    top = tuple(TokenLogprob(token="b", raw=b"b", logprob=-2.0) for _ in range(20))
    token = TokenLogprob(token="a", raw=b"a", logprob=-1.0, top=top)
    assert weigh(ContentDelta(text="a")) == EVENT_BYTES + 1
    with_logprobs = ContentDelta(text="a", logprobs=(token,))
    assert weigh(with_logprobs) == EVENT_BYTES + 1 + 21 * LOGPROB_BYTES
