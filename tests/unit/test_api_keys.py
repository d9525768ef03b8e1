"""Which headers open the server."""

import argparse
from pathlib import Path

import pytest

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.commands.serve import (
    add_arguments,
    check_exposure,
    is_loopback,
    read_again,
    settings_of,
)
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.pages.auth import KeyRing


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "passes"),
    [
        ("Bearer k1", None, True),
        ("bearer k2", None, True),
        (None, "k2", True),
        ("Bearer wrong", "k1", True),
        (None, None, False),
        ("Bearer k3", None, False),
        ("Bearer ", None, False),
        ("Basic k1", None, False),
        ("k1", None, False),
        (None, "", False),
        ("Bearer k1k2", "k", False),
        ("Bearer \udcff", None, False),
    ],
)
def test_any_known_key_passes_and_nothing_else(
    authorization: str | None, x_api_key: str | None, passes: bool
) -> None:
    assert KeyRing(["k1", "k2"]).accepts(authorization, x_api_key) is passes


def test_without_keys_everybody_passes() -> None:
    assert KeyRing([]).accepts(None, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    check_exposure(ServeSettings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_addresses_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host} lets other machines in, so an API key"):
        check_exposure(ServeSettings(host=host))
    check_exposure(ServeSettings(host=host, api_keys=("k",)))


def test_the_last_key_does_not_go_while_other_machines_are_let_in(tmp_path: Path) -> None:
    """Keys change at once, the address at the next start only."""
    file = tmp_path / "config.yaml"
    models = "models: {m: {path: /m}}"
    file.write_text(f"host: 0.0.0.0\napiKeys: [k]\n{models}")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--config", str(file)])
    started = settings_of(args)
    file.write_text(f"host: 127.0.0.1\n{models}")
    with pytest.raises(ConfigError, match="0.0.0.0 is listened on until the next start"):
        read_again(args, started)
    file.write_text(f"host: 127.0.0.1\napiKeys: [other]\n{models}")
    assert read_again(args, started).settings.api_keys == ("other",)
