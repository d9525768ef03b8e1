"""Which tokens made which content: their bytes join to exactly the text that was given out."""

from collections import deque

from mlx_isolate_engine.completion.events import TokenLogprob


class _Entry:
    """A token whose text is on its way.

    Its text is `piece` and, if it also began a character that later tokens complete, one unit more;
    together they are [start, end) in the raw text. `lead` bytes of its first character came from
    tokens before it, `tail` bytes belong to the unit at its end.
    """

    def __init__(self, logprob: TokenLogprob, piece: str, start: int, *, lead: int, tail: int):
        self._logprob = logprob
        self._piece = piece
        self._lead = lead
        self.start = start
        self.end = start + len(piece) + (tail > 0)
        raw = len(logprob.raw)
        # Not so where bytes were invalid, or the tokenizer's text is not the sum of its tokens.
        self._is_exact = len(piece.encode()) - (lead if piece else 0) + tail == raw
        self._shown = b""
        self._units_shown = 0

    @property
    def is_shown(self) -> bool:
        """Whether any of it was content."""
        return self._units_shown > 0

    def show(self, begin: int, end: int) -> None:
        """[begin, end) of the raw text is content."""
        first, last = max(begin, self.start) - self.start, min(end, self.end) - self.start
        if first >= last:
            return
        self._units_shown += last - first
        if self._is_exact:
            self._shown += self._logprob.raw[self._byte_at(first) : self._byte_at(last)]
        else:
            self._shown += self._piece[first:last].encode()

    def _byte_at(self, unit: int) -> int:
        if unit == 0:
            return 0
        if unit > len(self._piece):
            return len(self._logprob.raw)
        return len(self._piece[:unit].encode()) - self._lead

    def closed(self) -> TokenLogprob:
        """The token with the bytes of it that were content."""
        if self._units_shown == self.end - self.start:
            return self._logprob
        return TokenLogprob(
            token=self._shown.decode("utf-8", "replace"),
            raw=self._shown,
            logprob=self._logprob.logprob,
            top=self._logprob.top,
        )


class LogprobLedger:
    """Gives each piece of content the tokens that made it, so that their bytes join to it.

    The raw text runs through in order: every character is either taken (content) or skipped
    (markers, reasoning, tool calls). A token that is only partly content keeps that part's bytes.
    """

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._carried: list[TokenLogprob] = []
        self._written = 0
        self._pending = 0
        self._position = 0

    def add(self, logprob: TokenLogprob, piece: str, *, pending: int) -> None:
        """A token arrived that completes `piece` and leaves `pending` bytes of a character."""
        # A token without text only adds to the character that was begun before it.
        tail = pending if piece else pending - self._pending
        entry = _Entry(logprob, piece, self._written, lead=self._pending, tail=tail)
        self._written += len(piece)
        self._pending = pending
        self._entries.append(entry)

    def take(self, length: int) -> tuple[TokenLogprob, ...]:
        """The next `length` characters are content; the tokens that they complete."""
        begin, end = self._advance(length)
        for entry in self._entries:
            if entry.start >= end:
                break
            entry.show(begin, end)
        done, self._carried = self._carried, []
        while self._entries and self._entries[0].end <= end:
            done.append(self._entries.popleft().closed())
        return tuple(done)

    def skip(self, length: int) -> None:
        """The next `length` characters are not content."""
        _, end = self._advance(length)
        while self._entries and self._entries[0].end <= end:
            entry = self._entries.popleft()
            if entry.is_shown:
                self._carried.append(entry.closed())

    def finish(self) -> tuple[TokenLogprob, ...]:
        """Tokens of which a part was content, and whose rest will not come."""
        self._carried.extend(entry.closed() for entry in self._entries if entry.is_shown)
        self._entries.clear()
        return tuple(self._carried)

    def _advance(self, length: int) -> tuple[int, int]:
        begin = self._position
        self._position += length
        return begin, self._position
