"""What commands print for scripts under --json."""

import msgspec


def print_json(shown: object) -> None:
    """Print `shown` as one line of JSON."""
    print(msgspec.json.encode(shown).decode())
