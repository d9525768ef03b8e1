"""How an answer begins: its head, and what of its body comes before anybody takes it; pure."""

from mlx_isolate_supervisor.relay.answer_head import AnswerHead, HeadReader
from mlx_isolate_supervisor.relay.framing import Body, FramingError

# Body bytes that may arrive before anybody takes them; then the engine is made to wait.
_EARLY_BYTES_MAX = 256 * 1024


class AnswerStart:
    """The beginnings of a connection's answers, one after the other.

    Attributes:
        is_awaited: whether a request is out whose answer is not over.
        head: of the current answer; None until it has come.
        body: what follows that head; None before it, and after a 101.
    """

    __slots__ = ("_early", "_early_bytes", "_reader", "body", "head", "is_awaited")

    def __init__(self) -> None:
        self._reader = HeadReader()
        self._early: list[bytes] = []
        self._early_bytes = 0
        self.is_awaited = False
        self.head: AnswerHead | None = None
        self.body: Body | None = None

    def begin(self, *, is_bodiless: bool, may_upgrade: bool) -> None:
        """What comes from now on is another answer.

        Args:
            is_bodiless: whether it has no body whatever its head says (HEAD).
            may_upgrade: whether it may be a 101.
        """
        self._reader.begin(is_bodiless=is_bodiless, may_upgrade=may_upgrade)
        self.is_awaited = True
        self.head = None
        self.body = None

    def end(self) -> None:
        """The answer is over: nothing may come until another one begins."""
        self.take()
        self.is_awaited = False

    @property
    def is_unanswered(self) -> bool:
        """Whether a request is out and not a byte of its answer has come."""
        return self.is_awaited and self.head is None and not self._reader.has_begun

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more should come."""
        return self._early_bytes > _EARLY_BYTES_MAX

    def feed(self, data: bytes) -> bool:
        """Take what arrived; whether the head has come by now.

        Raises:
            FramingError: this is no answer, or nobody asked for one.
        """
        if not self.is_awaited:
            raise FramingError("bytes that nobody asked for")
        if self.head is None:
            beginning = self._reader.feed(data)
            if beginning is None:
                return False
            self.head, self.body, data = beginning
        if data:
            block = data if self.body is None else self.body.feed(data)
            self._early.append(block)
            self._early_bytes += len(block)
        return True

    def take(self) -> bytes:
        """What waits of the body, or behind a 101; it waits no more."""
        early = b"".join(self._early)
        self._early.clear()
        self._early_bytes = 0
        return early
