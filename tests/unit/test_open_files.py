"""The soft limit of open files is raised as far as wanted and allowed, and never lowered."""

import resource

import pytest

from mlx_isolate_supervisor.open_files import WANTED, allow_many_open_files

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "most", "then"),
    [
        ((1024, 4096), ENDLESS, (4096, 4096)),
        ((1024, 1 << 20), ENDLESS, (WANTED[0], 1 << 20)),
        ((256, ENDLESS), ENDLESS, (WANTED[0], ENDLESS)),
        # macOS says that there is no limit, and refuses what the kernel has no room for.
        ((256, ENDLESS), WANTED[1], (WANTED[1], ENDLESS)),
        ((256, ENDLESS), 300, (256, ENDLESS)),
        ((1 << 19, 1 << 20), ENDLESS, (1 << 19, 1 << 20)),
        ((ENDLESS, ENDLESS), ENDLESS, (ENDLESS, ENDLESS)),
    ],
)
def test_the_limit_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], most: int, then: tuple[int, int]
) -> None:
    own = [limits]

    def getrlimit(_: int) -> tuple[int, int]:
        return own[-1]

    def setrlimit(_: int, new: tuple[int, int]) -> None:
        if most not in (ENDLESS, *range(new[0], most + 1)):
            raise ValueError("current limit exceeds maximum limit")
        own.append(new)

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert allow_many_open_files() == then[0]
    assert own[-1] == then
