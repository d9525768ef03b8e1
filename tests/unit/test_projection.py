"""What a model will need, from its files or from earlier runs; and the book of those."""

from pathlib import Path

import msgspec
import pytest

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.devices import Device
from mlx_isolate_supervisor.models.footprints import (
    ENTRIES_MAX,
    Footprint,
    FootprintBook,
    footprint_key,
)
from mlx_isolate_supervisor.models.projection import (
    GPU_PROCESS_BYTES,
    PROCESS_BYTES,
    need_of,
    weights_bytes,
)
from mlx_isolate_supervisor.models.room import Need

MB = 1_000_000


def model(folder: Path, **engine: object) -> ModelSpec:
    settings = msgspec.convert(engine, EngineSettings)
    return ModelSpec(id="m", model=str(folder), engine=settings)


def measured(book: FootprintBook, key: str) -> int | None:
    found = book.measured(key)
    return None if found is None else found.bytes


def weights(folder: Path, name: str, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("wb") as file:
        file.truncate(size)


def test_weights_adapter_and_draft_model_count_and_nothing_else(tmp_path: Path) -> None:
    weights(tmp_path / "m", "model-1.safetensors", 100 * MB)
    weights(tmp_path / "m", "model-2.safetensors", 50 * MB)
    weights(tmp_path / "m", "tokenizer.json", 30 * MB)
    weights(tmp_path / "a", "adapters.safetensors", 2 * MB)
    weights(tmp_path / "d", "model.safetensors", 10 * MB)
    spec = model(tmp_path / "m", adapter_path=str(tmp_path / "a"), draft_model=str(tmp_path / "d"))
    assert weights_bytes(spec) == 162 * MB


def test_a_snapshot_of_links_counts_each_file_once(tmp_path: Path) -> None:
    weights(tmp_path / "m/blobs", "blob.bin", 100 * MB)
    snapshot = tmp_path / "m/snapshots/x"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(tmp_path / "m/blobs/blob.bin")
    assert weights_bytes(model(tmp_path / "m")) == 100 * MB


def test_the_need_is_weights_and_process_and_the_share_of_the_prompt_cache(tmp_path: Path) -> None:
    weights(tmp_path / "m", "model.safetensors", 100 * MB)
    spec = model(tmp_path / "m", prompt_cache_bytes=7 * MB)
    assert need_of(spec, None) == Need(bytes=PROCESS_BYTES + 120 * MB + 7 * MB)
    assert need_of(spec, Footprint(bytes=500 * MB, at=1.0)) == Need(bytes=507 * MB)


def test_on_a_gpu_with_memory_of_its_own_weights_and_prompt_cache_lie_there(tmp_path: Path) -> None:
    weights(tmp_path / "m", "model.safetensors", 100 * MB)
    spec = model(tmp_path / "m", prompt_cache_bytes=7 * MB)
    cuda = {"": Device(backend="cuda", memory_bytes=80_000 * MB)}
    assert need_of(spec, None, cuda) == Need(
        bytes=PROCESS_BYTES + 120 * MB, gpu_bytes=GPU_PROCESS_BYTES + 127 * MB
    )
    known = Footprint(bytes=400 * MB, gpu_bytes=110 * MB, at=1.0)
    assert need_of(spec, known, cuda) == Need(
        bytes=400 * MB, gpu_bytes=GPU_PROCESS_BYTES + 117 * MB
    )
    shared = {"": Device(backend="metal", memory_bytes=80_000 * MB)}
    assert need_of(spec, known, shared) == Need(bytes=407 * MB)


def test_a_model_with_a_gpu_of_its_own_counts_there(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(model(tmp_path), env={"CUDA_VISIBLE_DEVICES": " 3,1"})
    cuda = {"3": Device(backend="cuda", memory_bytes=80_000 * MB)}
    assert need_of(spec, None, cuda).gpu == "3"
    assert need_of(model(tmp_path), None, cuda) == Need(bytes=PROCESS_BYTES)


def test_a_model_that_is_not_there_yet_needs_a_process(tmp_path: Path) -> None:
    assert need_of(model(tmp_path / "nowhere"), None) == Need(bytes=PROCESS_BYTES)


def test_a_measurement_outlives_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "state/footprints.json"
    FootprintBook(path).note("k", 900 * MB)
    assert measured(FootprintBook(path), "k") == 900 * MB
    assert measured(FootprintBook(path), "other") is None
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_so_is_what_was_held_of_a_gpu() -> None:
    book = FootprintBook(None)
    for held, kept in ((1000, 1000), (400, 900), (2000, 2000)):
        book.note("k", 100 * MB, held * MB)
        found = book.measured("k")
        assert found is not None and found.gpu_bytes == kept * MB
    for wrong in (-1, 1 << 60):
        book.note("k", 100 * MB, wrong)
        assert book.measured("k") == found


def test_an_exceptional_peak_is_forgotten_over_the_next_runs() -> None:
    book = FootprintBook(None)
    book.note("k", 1000 * MB)
    for _ in range(10):
        book.note("k", 400 * MB)
    assert measured(book, "k") == 400 * MB
    book.note("k", 1200 * MB)
    assert measured(book, "k") == 1200 * MB


def test_changed_files_and_settings_make_it_another_model(tmp_path: Path) -> None:
    weights(tmp_path / "m", "model.safetensors", 1 * MB)
    spec = model(tmp_path / "m")
    key = footprint_key(spec)
    assert footprint_key(model(tmp_path / "m", kv_bits=8)) != key
    assert footprint_key(model(tmp_path / "m", temp=1.0)) == key
    weights(tmp_path / "m", "model.safetensors", 2 * MB)
    assert footprint_key(spec) != key


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"[" * 100_000,
        b"x" * 300_000,
        b'{"version":1}',
        b'{"version":2,"models":{"k":{"bytes":5000000,"at":1}}}',
        b'{"version":1,"models":{"k":{"bytes":-5,"at":1}}}',
        b'{"version":1,"models":{"k":{"bytes":99999999999999999,"at":1}}}',
        b'{"version":1,"models":{"k":{"bytes":5000000,"at":1e300}}}',
        b'{"version":1,"models":{"k":{"bytes":"many","at":1}}}',
    ],
)
def test_a_file_that_makes_no_sense_is_ignored_and_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "footprints.json"
    path.write_bytes(content)
    book = FootprintBook(path)
    assert measured(book, "k") is None
    book.note("k", 5 * MB)
    assert measured(FootprintBook(path), "k") == 5 * MB


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    book = FootprintBook(tmp_path / "file/footprints.json")
    book.note("k", 5 * MB)
    assert measured(book, "k") == 5 * MB


def test_two_daemons_keep_each_others_measurements(tmp_path: Path) -> None:
    path = tmp_path / "footprints.json"
    one, other = FootprintBook(path), FootprintBook(path)
    one.note("a", 5 * MB)
    other.note("b", 6 * MB)
    found = FootprintBook(path)
    assert (measured(found, "a"), measured(found, "b")) == (5 * MB, 6 * MB)


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "footprints.json"
    old = {f"k{n}": {"bytes": 5 * MB, "at": float(n + 1)} for n in range(ENTRIES_MAX)}
    path.write_bytes(msgspec.json.encode({"version": 1, "models": old}))
    book = FootprintBook(path)
    book.note("new", 5 * MB)
    assert measured(book, "k0") is None and measured(book, "k1") == 5 * MB
