"""Random damage to bytes, as disks, torn writes and bad tools do it; seeded."""

import random
import struct


def damaged(chance: random.Random, data: bytes, upto: int | None = None) -> bytes:
    """`data` with one to four changes within its first `upto` bytes (None: anywhere)."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        if not out:
            break
        end = min(len(out), upto or len(out))
        at = chance.randrange(end)
        how = chance.randrange(7)
        if how == 0:
            out[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            del out[at : at + chance.choice((1, 4, 30))]
        elif how == 2:
            out[at:at] = bytes(chance.randrange(256) for _ in range(chance.choice((1, 8))))
        elif how == 3:
            size = chance.choice((4, 8))
            numbers = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, chance.randrange(2**32))
            wide = (*numbers, 2**63 - 1, 2**64 - 1)
            number = chance.choice(numbers if size == 4 else wide)
            out[at : at + size] = struct.pack("<I" if size == 4 else "<Q", number)
        elif how == 4:
            out[at:at] = out[at : at + chance.choice((10, 200))]
        elif how == 5:
            out[at : at + 8] = bytes(8)
        elif chance.random() < 0.3:
            del out[at:]
    return bytes(out)
