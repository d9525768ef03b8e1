"""The order of a run names files that exist, and tests of one scope stay together."""

from pathlib import Path

from tests.distribution import LAST, LONGEST, SHARED, rank, scope_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_files_that_are_named_exist() -> None:
    named = [*SHARED, *(scope for scope in LONGEST if scope not in SHARED.values())]
    assert [file for file in named if not (ROOT / file).is_file()] == []
    assert set(SHARED.values()) <= {*LONGEST, LAST}


def test_every_test_of_the_page_shares_the_browser() -> None:
    files = [str(file.relative_to(ROOT)) for file in (ROOT / "tests/e2e/ui").glob("test_*.py")]
    assert {scope_of(file) for file in files} == {"one browser"}


def test_files_that_share_run_as_one_and_others_alone() -> None:
    assert scope_of("tests/e2e/test_abuse.py::test_a[1::2]") == scope_of(
        "tests/e2e/test_oracle.py::b"
    )
    assert scope_of("tests/unit/test_idle.py::test_a") == "tests/unit/test_idle.py"


def test_the_longest_come_first_and_those_alone_last_and_a_scope_stays_together() -> None:
    tests = [
        "tests/e2e/test_abuse.py::a",
        "tests/unit/test_idle.py::a",
        "tests/faults/test_drills.py::a",
        "tests/e2e/test_oracle.py::a",
        "tests/architecture/test_docs.py::a",
    ]
    assert sorted(tests, key=rank) == [tests[0], tests[3], tests[4], tests[1], tests[2]]
