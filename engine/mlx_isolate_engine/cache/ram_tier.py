"""The RAM tier: whole prefix entries in least-recently-used order under a byte cap.

Pure bookkeeping: it never looks into a cache, takes no clock and writes nothing; what has to leave
is returned to the caller, who may spill it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from mlx_isolate_engine.cache.token_index import Match, TokenIndex
from mlx_isolate_engine.generation.ports import EntryKind


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """One stored prefix; never changed after it was made.

    Attributes:
        key: the exact tokens (token_index.token_key).
        cache: mlx-lm cache objects, evaluated, held by this entry alone.
        cuttable: the cache may be handed out for a shorter prefix.
        storable: the cold tier can hold it.
        kind: which part of a conversation ends here.
    """

    namespace: str
    key: bytes
    cache: list[Any]
    bytes: int
    cuttable: bool
    storable: bool
    kind: EntryKind


@dataclass(frozen=True, kw_only=True)
class Put:
    """What an insertion pushed out.

    Attributes:
        evicted: had to leave to hold the caps.
        absorbed: prefixes that the new entry serves as well.
    """

    evicted: tuple[Entry, ...] = ()
    absorbed: tuple[Entry, ...] = ()


class RamTier:
    """Entries by namespace and exact tokens.

    Args:
        entries_max: entries at most; 0 keeps nothing.
        bytes_max: bytes of all entries at most; None for no cap.
    """

    def __init__(self, *, entries_max: int, bytes_max: int | None) -> None:
        self.entries_max = entries_max
        self.bytes_max = bytes_max
        self.bytes = 0
        self._index: dict[str, TokenIndex[Entry]] = {}
        self._order: OrderedDict[tuple[str, bytes], Entry] = OrderedDict()

    def __len__(self) -> int:
        """Entries held."""
        return len(self._order)

    def entries(self) -> list[Entry]:
        """Entries, least recently used first."""
        return list(self._order.values())

    def has(self, entry: Entry) -> bool:
        """Whether exactly this entry is still here."""
        return self._order.get((entry.namespace, entry.key)) is entry

    def find(self, namespace: str, key: bytes, *, length_max: int) -> Match[Entry] | None:
        """The entry that stands for most tokens of `key`; marks nothing as used."""
        index = self._index.get(namespace)
        return index.find(key, length_max=length_max) if index else None

    def longest_shared(self, namespace: str, key: bytes) -> int:
        """Tokens that any entry of the namespace shares with `key`, usable or not."""
        index = self._index.get(namespace)
        return index.longest_shared(key) if index else 0

    def use(self, entry: Entry) -> None:
        """Mark an entry as just used, its stored prefixes after it.

        The prefixes served too: without this the checkpoint at the end of a system prompt, which
        every conversation needs again, would be the first to leave.
        """
        self._order.move_to_end((entry.namespace, entry.key))
        for prefix in self._index[entry.namespace].prefixes(entry.key):
            self._order.move_to_end((entry.namespace, prefix))

    def put(self, entry: Entry) -> Put:
        """Insert as most recently used, in the place of an entry of the same tokens.

        An entry above the byte cap by itself is evicted alone at once.
        """
        if self.entries_max <= 0 or (self.bytes_max is not None and entry.bytes > self.bytes_max):
            return Put(evicted=(entry,))
        index = self._index.setdefault(entry.namespace, TokenIndex())
        prefixes = index.prefixes(entry.key) if entry.cuttable else []
        absorbed = [self._order[entry.namespace, prefix] for prefix in prefixes]
        self._forget(entry.namespace, entry.key)
        for prefix in prefixes:
            self._forget(entry.namespace, prefix)
        index = self._index.setdefault(entry.namespace, TokenIndex())
        index.add(entry.key, entry, cuttable=entry.cuttable)
        self._order[entry.namespace, entry.key] = entry
        self.bytes += entry.bytes
        self.use(entry)
        return Put(evicted=tuple(self._evict()), absorbed=tuple(absorbed))

    def remove(self, entry: Entry) -> None:
        """Take an entry out; harmless if it has gone."""
        if self.has(entry):
            self._forget(entry.namespace, entry.key)

    def trim(self, bytes_max: int) -> list[Entry]:
        """Evict from the least recently used until at most `bytes_max` bytes are held."""
        gone: list[Entry] = []
        while self.bytes > max(0, bytes_max):
            gone.append(self._pop_oldest())
        return gone

    def clear(self) -> None:
        """Forget everything, spilling nothing."""
        self._order.clear()
        self._index.clear()
        self.bytes = 0

    def _evict(self) -> list[Entry]:
        gone: list[Entry] = []
        while len(self._order) > self.entries_max or (
            self.bytes_max is not None and self.bytes > self.bytes_max
        ):
            gone.append(self._pop_oldest())
        return gone

    def _pop_oldest(self) -> Entry:
        entry = next(iter(self._order.values()))
        self._forget(entry.namespace, entry.key)
        return entry

    def _forget(self, namespace: str, key: bytes) -> None:
        entry = self._order.pop((namespace, key), None)
        if entry is None:
            return
        self.bytes -= entry.bytes
        index = self._index[namespace]
        index.remove(key)
        if not len(index):
            del self._index[namespace]
