"""How a client command fails."""


class CommandError(Exception):
    """The daemon cannot be reached or said no; the message is one sentence for a person."""
