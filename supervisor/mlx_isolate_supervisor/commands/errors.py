"""How a client command fails."""


class CommandError(Exception):
    """The daemon cannot be reached or said no; the message is one sentence for a person."""


class NoAnswerError(CommandError):
    """Nothing answers where a daemon should."""
