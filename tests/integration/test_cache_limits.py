"""The limits of the prompt cache in a running engine: memory, the disk's share, no disk at all."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.test_cache_history import Talk
from tests.waiting import wait_for

MIB = 1 << 20
# What the process may hold beyond what it had and the cap: MLX's pool of freed buffers, the row
# that runs, fragments.
SLACK = 96 * MIB
Start = Callable[..., Talk]


@pytest.fixture
def start() -> Iterator[Start]:
    talks: list[Talk] = []

    def build(*arguments: object, **settings: object) -> Talk:
        talks.append(Talk(*arguments, **settings))  # type: ignore[arg-type]
        return talks[-1]

    yield build
    for talk in talks:
        talk.close()


@pytest.mark.case("26")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("prompts", "cap"), [(24, 16 * MIB), pytest.param(400, 64 * MIB, marks=pytest.mark.slow)]
)
def test_memory_levels_off_at_the_cap(
    full_model: Path, start: Start, prompts: int, cap: int
) -> None:
    talk = start(full_model, None, prompt_cache_bytes=cap, prompt_cache_size=1000)
    process = psutil.Process(talk.process.child.pid)
    talk.ask("a first one, so that threads and buffers are there")
    before = process.memory_info().rss
    sizes: list[int] = []
    for number in range(prompts):
        # Distinct from the first token of the user's turn on; a third each of every way.
        text = f"{number} is a number. " * 4 + "What is it? " * 30
        if number % 3 == 2:
            talk.cut_off(text, 1)
        else:
            talk.ask(text, 2, messages=[{"role": "user", "content": text}])
        sizes.append(process.memory_info().rss)
        assert talk.call("/v1/cache/stats")["ram_bytes"] <= cap
    assert talk.call("/v1/cache/stats")["ram_bytes"] > cap // 2, "the cap was never near"
    assert max(sizes) - before <= cap + SLACK
    last = 3 * len(sizes) // 4
    assert max(sizes[last:]) <= max(sizes[:last]) + cap // 4, "still growing at the end"


def own_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.safetensors") if not path.is_symlink()]


def size_of(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


@pytest.mark.case("23")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("filled", "more"), [(10, 20), pytest.param(40, 50, marks=pytest.mark.slow)]
)
def test_half_the_cap_holds_from_the_start_and_strangers_stay(
    full_model: Path, tmp_path: Path, start: Start, filled: int, more: int
) -> None:
    root, outside = tmp_path / "cache", tmp_path / "outside"
    first = start(full_model, root, prompt_cache_size=50)
    for number in range(filled):
        first.ask(f"{number}: tell me", 2)
        first.flush()
    before = own_files(root)
    newest = max(before, key=lambda path: path.stat().st_mtime_ns)
    first.close()
    outside.mkdir()
    (outside / "mine.safetensors").write_bytes(b"x" * 1000)
    foreign = newest.parent / "notes.safetensors"
    foreign.write_bytes(b"y" * 1000)
    (newest.parent / f"{'1' * 32}.safetensors").symlink_to(outside / "mine.safetensors")
    cap = size_of(before) // 2
    second = start(full_model, root, prompt_cache_size=50, ssd_cache_bytes_max=cap)

    def ours() -> int:
        return size_of([path for path in own_files(root) if path != foreign])

    assert ours() <= cap, "from the start on"
    assert newest.exists(), "what was used last survives"
    for number in range(more):
        second.ask(f"later {number}: tell me", 2)
        if number % 5 == 4:
            second.flush()
            assert ours() <= cap
    assert foreign.read_bytes() == b"y" * 1000
    assert [path.name for path in outside.iterdir()] == ["mine.safetensors"]
    assert (outside / "mine.safetensors").read_bytes() == b"x" * 1000


@pytest.mark.case("22")
def test_an_engine_starts_with_a_directory_that_cannot_be_used_and_takes_it_when_it_can(
    full_model: Path, tmp_path: Path, start: Start
) -> None:
    root = tmp_path / "cache"
    root.write_text("a file is in the way")
    talk = start(full_model, root)
    answer, _ = talk.ask("hello", 4)
    again, cached = talk.ask("hello", 4)
    assert (again, cached > 0) == (answer, True)
    evidence = talk.call("/admin/cache/flush?timeout_s=20", "POST")
    assert evidence["durable"] is False
    warnings = [line for line in talk.process.log.splitlines() if "cache." in line]
    assert 1 <= len(warnings) <= 4, warnings
    assert root.read_text() == "a file is in the way"
    root.unlink()
    talk.flush()
    assert own_files(root)


@pytest.mark.alone
@pytest.mark.case("24")
@pytest.mark.skipif(sys.platform != "linux", reason="kills as Linux does")
def test_what_a_restart_restores_takes_a_part_of_a_prefills_time(
    full_model: Path, tmp_path: Path, start: Start
) -> None:
    root = tmp_path / "cache"
    talk = start(full_model, root, prompt_cache_size=50)

    def prompt_ms(text: str) -> tuple[float, int, int]:
        """Milliseconds until the first token, cached tokens, prompt tokens; warmed up."""
        answer = talk.answer(text, 4)
        usage = answer["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return answer["timings"]["prompt_ms"], cached, usage["prompt_tokens"]

    # The shared beginning is kept; each of these has a long rest of its own.
    texts = [f"{number}, " + "and so on, " * 30 for number in range(3)]
    cold = min(prompt_ms(text)[0] for text in texts)
    talk.flush()
    talk.kill_and_restart()
    talk.ask("something else, so that the process is warm")
    warm = [prompt_ms(text) for text in texts]
    assert all(cached >= 0.8 * total for _, cached, total in warm)
    assert min(ms for ms, _, _ in warm) < cold / 2, (warm, cold)
    wait_for(lambda: talk.call("/v1/cache/stats")["restores"] >= 3, 5, "they came from disk")
