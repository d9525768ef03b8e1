"""The SSD tier: an index over cache files of one model, which are themselves the database.

The index is read from headers at the start and whenever a folder has changed since; what it says
may be stale at any time, because other engines write and evict too. A file is trusted only after
its header has been checked again at the moment of use.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_isolate_engine.cache import kv_check, kv_io
from mlx_isolate_engine.cache.array_codec import ArrayBuffers, Flat, flatten
from mlx_isolate_engine.cache.cold_tier import ColdStats, Found
from mlx_isolate_engine.cache.damage import Damage
from mlx_isolate_engine.cache.directory import CacheDirectory
from mlx_isolate_engine.cache.kinds import stands_for
from mlx_isolate_engine.cache.kv_file import EntryFacts
from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.snapshot import cut_in_place
from mlx_isolate_engine.cache.token_index import TokenIndex, key_length
from mlx_isolate_engine.cache.trouble import Trouble
from mlx_isolate_shared.errors import CacheError

log = logging.getLogger(__name__)

# A file's time is set at most this often while its entry is used from RAM.
TOUCH_INTERVAL_S = 60.0
# Headers that one look at a folder reads at most: a folder filled by somebody else meanwhile must
# not hold up those who generate. The next looks read the rest.
LOOK_FILES_MAX = 64
# How often a write begins again whose folder or unfinished file somebody else has just removed.
FOLDER_TRIES_MAX = 3
# A folder changed within the clock's grain could change again unseen.
CLOCK_GRAIN_NS = 50_000_000


@dataclass(frozen=True, kw_only=True)
class StoreIdentity:
    """What every file of this engine says about its model (see kv_file.EntryFacts)."""

    model: str
    model_id: str
    fingerprint: str
    tokenizer: str
    tokenizer_config: str = "{}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """One known file."""

    path: Path
    namespace: str
    key: bytes
    bytes: int
    cuttable: bool


class SsdStore:
    """Implements `ColdTier` over a directory.

    Args:
        root: the directory; shared with other engines.
        bytes_max: cap for the whole directory.
        verify: check tensor data at every restore, not only headers and lengths.
    """

    def __init__(
        self, root: Path, identity: StoreIdentity, *, bytes_max: int, verify: bool = False
    ) -> None:
        self.directory = CacheDirectory(root)
        self.identity = identity
        self.bytes_max = bytes_max
        self._verify = verify
        self._buffers = ArrayBuffers()
        self._lock = threading.RLock()
        self._index: dict[Path, TokenIndex[Record]] = {}
        self._records: dict[Path, Record] = {}
        # The same by folder, as a listing shows them: thousands of paths are slow to make.
        self._names: dict[Path, set[str]] = {}
        self._folder_times: dict[Path, int] = {}
        self._touched: dict[Path, float] = {}
        self._bytes = 0
        self._evicted = 0
        self._warned = False
        self._trouble = Trouble(root)
        self.damage: Counter[str] = Counter()

    def open(self) -> None:
        """Make the directory, clear up after dead writers, read headers, hold the cap.

        Raises:
            OSError: the directory cannot be written or not even be read now. The store may be
                used all the same: what could be read is found, and every write tries again.
        """
        with self._lock, self._trouble.noted():
            self.directory.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.remove_orphans()
            gone, self._bytes = self.directory.make_room(0, self.bytes_max)
            self._drop(gone)
            for folder in {f.path.parent for f in self.directory.files()}:
                if folder.parent.name == self.identity.fingerprint:
                    self._refresh(folder, files_max=None)
            self.directory.check_writable()

    def find(self, namespace: str, key: bytes, *, length_max: int) -> Found | None:
        """See ColdTier."""
        with self._lock:
            folder = self._folder(namespace)
            try:
                self._refresh(folder, files_max=LOOK_FILES_MAX)
            except OSError as error:
                self._note_unreadable(folder, error)
            index = self._index.get(folder)
            match = index.find(key, length_max=length_max) if index else None
            if match is None:
                return None
            record = match.value
            share = match.length / key_length(record.key) if record.cuttable else 1.0
            return Found(
                namespace=namespace,
                key=record.key,
                length=match.length,
                bytes=int(record.bytes * share),
                handle=record,
            )

    def has(self, namespace: str, key: bytes, *, cuttable: bool) -> bool:
        """See ColdTier."""
        with self._lock:
            while (record := self._record_for(namespace, key, cuttable=cuttable)) is not None:
                # Anybody may have removed the file: then the entry is in RAM alone.
                if os.path.lexists(record.path):
                    return True
                self._drop([record.path])
            return False

    def _record_for(self, namespace: str, key: bytes, *, cuttable: bool) -> Record | None:
        index = self._index.get(self._folder(namespace))
        if index is None:
            return None
        if (record := index.get(key)) is not None:
            return record
        length = key_length(key)
        match = index.find(key, length_max=length) if cuttable else None
        if match is None or match.length < length or not match.value.cuttable:
            return None
        return match.value

    def restore(self, found: Found, *, room_for: int) -> Generator[None, None, list[Any]]:
        """See ColdTier."""
        record: Record = found.handle
        try:
            descriptor, header = kv_check.open_entry(record.path)
            try:
                self._check_identity(header.facts, record)
                cache = yield from kv_io.read(
                    descriptor,
                    header,
                    length=found.length,
                    room_for=room_for,
                    buffers=self._buffers,
                    check=self._verify,
                )
                if not stands_for(cache, header.facts.length):
                    raise Damage("structure", "positions disagree with the tokens")
            finally:
                os.close(descriptor)
        except Damage as damage:
            self._reject(record.path, damage)
            raise
        cut_in_place(cache, found.length)
        self.directory.stamp(record.path)
        return cache

    def _check_identity(self, facts: EntryFacts, record: Record | None) -> None:
        if (facts.fingerprint, facts.tokenizer) != (
            self.identity.fingerprint,
            self.identity.tokenizer,
        ):
            raise Damage("fingerprint")
        if record is not None and (facts.namespace, facts.key) != (record.namespace, record.key):
            raise Damage("fingerprint", "the file was exchanged")

    def store(self, entry: Entry, gate: Callable[[], None]) -> Path:
        """See ColdTier; returns the file."""
        flat = flatten(entry.cache)
        facts = EntryFacts(
            model=self.identity.model,
            tokenizer_config=self.identity.tokenizer_config,
            model_id=self.identity.model_id,
            namespace=entry.namespace,
            fingerprint=self.identity.fingerprint,
            tokenizer=self.identity.tokenizer,
            key=entry.key,
            kind=entry.kind,
            cuttable=entry.cuttable,
            created=time.time(),
            classes=flat.classes,
            scalars=flat.scalars,
            rounded=flat.rounded,
        )
        size = kv_io.file_bytes(facts, flat)
        if size > self.bytes_max:
            raise CacheError(f"an entry of {size} bytes is above the cap of the directory")
        with self._trouble.noted():
            self._make_room(size)
            final = self._write(facts, flat, gate)
        self.directory.stamp(final)
        with self._lock:
            kept = self._add(Record(
                path=final, namespace=entry.namespace, key=entry.key, bytes=size,
                cuttable=entry.cuttable,
            ))  # fmt: skip
            self._remove_superseded(kept)
        self._make_room(0)  # two writers may have made room for the same bytes
        return kept.path

    def _write(self, facts: EntryFacts, flat: Flat, gate: Callable[[], None]) -> Path:
        """Write a file; others may remove the folder while it is empty, or clear the file away."""
        for tries_left in reversed(range(FOLDER_TRIES_MAX)):
            try:
                folder = self.directory.make_folder(facts.fingerprint, facts.namespace)
                temporary, final = self.directory.new_names(folder)
                kv_io.write(temporary, final, facts, flat, gate)
                return final
            except FileNotFoundError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _remove_superseded(self, record: Record) -> None:
        """A cuttable entry serves all its prefixes: their files only take space."""
        if not record.cuttable:
            return
        index = self._index[record.path.parent]
        for prefix in index.prefixes(record.key):
            shorter = index.get(prefix)
            if shorter is not None and shorter.cuttable:
                self._delete(shorter.path)

    def _make_room(self, size: int) -> None:
        gone, total = self.directory.make_room(size, self.bytes_max)
        with self._lock:
            self._drop(gone)
            self._evicted += len(gone)
            self._bytes = total

    def touch(self, namespace: str, key: bytes) -> None:
        """See ColdTier; sets the file's time at most every TOUCH_INTERVAL_S."""
        with self._lock:
            index = self._index.get(self._folder(namespace))
            match = index.find(key, length_max=key_length(key)) if index else None
            if match is None or match.length < key_length(key):
                return
            path = match.value.path
            now = time.monotonic()
            if now - self._touched.get(path, -TOUCH_INTERVAL_S) >= TOUCH_INTERVAL_S:
                self._touched[path] = now
                self.directory.stamp(path)

    def clear(self) -> int:
        """See ColdTier."""
        with self._lock:
            paths = list(self._records)
            for path in paths:
                self._delete(path)
            with contextlib.suppress(OSError):
                self._bytes = sum(f.bytes for f in self.directory.files())
            return len(paths)

    def look_again(self) -> None:
        """See ColdTier."""
        if self._trouble.told:
            with contextlib.suppress(OSError), self._trouble.noted():
                self.directory.check_writable()

    def stats(self) -> ColdStats:
        """See ColdTier."""
        with self._lock:
            return ColdStats(
                entries=len(self._records),
                bytes=self._bytes,
                bytes_max=self.bytes_max,
                quarantined=sum(n for r, n in self.damage.items() if r != "vanished"),
                evicted=self._evicted,
                longest_prefix=max((key_length(r.key) for r in self._records.values()), default=0),
                trouble=self._trouble.told,
            )

    def _folder(self, namespace: str) -> Path:
        return self.directory.folder(self.identity.fingerprint, namespace)

    def _refresh(self, folder: Path, *, files_max: int | None) -> None:
        """Read what has come to a folder, and forget what has gone, if it changed at all.

        Args:
            files_max: headers to read at most; the next call goes on.

        Raises:
            OSError: the folder cannot be read.
        """
        try:
            changed_ns = os.stat(folder, follow_symlinks=False).st_mtime_ns
        except OSError:
            changed_ns = 0
        if self._folder_times.get(folder) == changed_ns:
            return
        known = self._names.setdefault(folder, set())
        present = self.directory.names(folder, known)
        self._drop([folder / name for name in known - present])
        new = list(present - known)
        for name in new[:files_max]:
            self._read_record(folder / name)
        # Either side of now: a clock may have been set back.
        is_settled = abs(time.time_ns() - changed_ns) > CLOCK_GRAIN_NS
        is_whole = files_max is None or len(new) <= files_max
        self._folder_times[folder] = changed_ns if is_settled and is_whole else -1

    def _note_unreadable(self, folder: Path, error: OSError) -> None:
        """The system does not show a folder: what is known of it may still be read."""
        self._folder_times[folder] = -1
        self.damage["unreadable"] += 1
        if not self._warned:  # one line, however long the disk is ill
            self._warned = True
            log.warning("cache.folder_unreadable folder=%s cause=%s", folder, error.strerror)

    def _read_record(self, path: Path) -> None:
        try:
            facts, size = kv_check.read_facts(path)
            self._check_identity(facts, None)
            if self._folder(facts.namespace) != path.parent:
                raise Damage("fingerprint", "in another namespace's folder")
        except Damage as damage:
            self._reject(path, damage)
            return
        self._add(Record(
            path=path, namespace=facts.namespace, key=facts.key, bytes=size,
            cuttable=facts.cuttable,
        ))  # fmt: skip

    def _reject(self, path: Path, damage: Damage) -> None:
        with self._lock:
            self.damage[damage.reason] += 1
            self._drop([path])
        if damage.reason not in ("vanished", "unreadable"):
            log.warning("cache.quarantined file=%s cause=%s", path.name, damage)
            self.directory.quarantine(path)

    def _add(self, record: Record) -> Record:
        """Know a file; of two of the same tokens one is removed, and the other returned.

        Every engine keeps the one whose name is greater: were it the newcomer, two engines that
        find each other's file would remove both.
        """
        index = self._index.setdefault(record.path.parent, TokenIndex())
        known = index.get(record.key)
        if known is not None and known.path != record.path:
            if known.path.name > record.path.name and os.path.lexists(known.path):
                self._delete(record.path)
                return known
            self._delete(known.path)
        # The same path: it was seen in the folder before its writer came to say so.
        index.add(record.key, record, cuttable=record.cuttable)
        self._records[record.path] = record
        self._names.setdefault(record.path.parent, set()).add(record.path.name)
        return record

    def _delete(self, path: Path) -> None:
        self._drop([path])
        self.directory.remove(path)

    def _drop(self, paths: list[Path]) -> None:
        for path in paths:
            record = self._records.pop(path, None)
            self._touched.pop(path, None)
            if record is None:
                continue
            self._names[path.parent].discard(path.name)
            index = self._index[path.parent]
            if index.get(record.key) is record:
                index.remove(record.key)
