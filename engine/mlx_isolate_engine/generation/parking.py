"""Rows that were taken out of the batch to go on later: parked ones, and those that may come back."""

from typing import Any

from mlx_isolate_engine.generation.row import Row
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_shared.clock import Clock


class Parked:
    """A row that was taken out of the batch: its cache, its tokens, and the one to run next.

    `since` is when it began to wait for its place, in seconds.
    """

    def __init__(self, row: Row, cache: list[Any], tokens: list[int], next_token: int) -> None:
        self.since = 0.0
        self.row = row
        self.cache = cache
        self.tokens = tokens
        self.next_token = next_token


class Parking:
    """All of them.

    Attributes:
        resuming: those that wait for their place in the batch, in order of arrival.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parked: dict[Ticket, Parked] = {}
        self.resuming: list[Parked] = []

    @property
    def rows(self) -> list[Row]:
        """The rows of all of them."""
        return [each.row for each in (*self._parked.values(), *self.resuming)]

    def park(self, parked: Parked) -> None:
        """Its reader has stopped; it stays until that one goes on."""
        ticket = parked.row.ticket
        self._parked[ticket] = parked
        ticket.is_parked = True

    def resume(self, ticket: Ticket) -> None:
        """The reader goes on; harmless if its row is not parked."""
        parked = self._parked.pop(ticket, None)
        if parked is not None:
            ticket.is_parked = False
            self.put_in_line(parked)

    def put_in_line(self, parked: Parked) -> None:
        """It waits for its place from now on."""
        parked.since = self._clock.monotonic()
        self.resuming.append(parked)

    def pop(self, ticket: Ticket) -> Parked | None:
        """Take out the one of `ticket`, wherever it is; None if it is not here."""
        parked = self._parked.pop(ticket, None)
        if parked is None:
            parked = next((each for each in self.resuming if each.row.ticket is ticket), None)
            if parked is not None:
                self.resuming.remove(parked)
        return parked
