"""Which model and which path of its engine a path below /upstream means."""

import pytest

from mlx_isolate_supervisor.relay.target import Target, asks_for_work, split_upstream

KNOWN = {"m", "org/model", "org/model/v1", "a b"}


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("m/v1/models", Target(path="/v1/models", model="m", is_work=False)),
        ("m/v1/chat/completions", Target(path="/v1/chat/completions", model="m")),
        ("m", Target(path="/", model="m", is_work=False)),
        ("m/", Target(path="/", model="m", is_work=False)),
        ("org/model/health", Target(path="/health", model="org/model", is_work=False)),
        ("org%2Fmodel/health", Target(path="/health", model="org/model", is_work=False)),
        ("a%20b/x%2Fy//z", Target(path="/x%2Fy//z", model="a b", is_work=False)),
        # The longest name wins, and what follows it is not looked at.
        ("org/model/v1/models", Target(path="/models", model="org/model/v1", is_work=False)),
        ("m/../status", Target(path="/../status", model="m", is_work=False)),
        ("nobody/x", Target(path="/", model="nobody/x", is_work=False)),
    ],
)
def test_the_longest_known_name_ends_the_models_part(path: str, target: Target) -> None:
    assert split_upstream("/upstream/" + path, KNOWN.__contains__) == target


def test_a_long_path_is_not_searched_to_its_end() -> None:
    asked: list[str] = []

    def is_known(name: str) -> bool:
        asked.append(name)
        return False

    split_upstream("/upstream/" + "x/" * 10_000, is_known)
    assert len(asked) < 20


@pytest.mark.parametrize(
    ("path", "is_work"),
    [
        ("/v1/chat/completions", True),
        ("/chat/completions", True),
        ("/upstream/org/model/v1/messages", True),
        ("/v1/chat/completions/x", False),
        ("/models/load", False),
        ("/admin/cache/flush", False),
        ("/upstream/m/admin/cache/flush", False),
        ("/upstream/m/v1/cache", False),
        ("/upstream/m", False),
    ],
)
def test_work_is_told_from_controls_by_its_path(path: str, is_work: bool) -> None:
    assert asks_for_work(path) == is_work
