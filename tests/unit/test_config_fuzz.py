"""Any configuration is either taken or refused in a sentence; nothing else ever comes out."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.settings.file import (
    DAEMON_FLAGS,
    ENGINE_FLAGS,
    FILTER_KEYS,
    GROUP_KEYS,
    MODEL_KEYS,
    TOP_NAMES,
    TOP_PARTS,
    parse_file,
)
from mlx_isolate_supervisor.settings.layers import Layers, Machine, resolve
from mlx_isolate_supervisor.settings.yaml_text import parse_yaml

MACHINE = Machine(memory_bytes=10**11, disk_bytes=lambda folder: 10**12)
KEYS = sorted(
    {*DAEMON_FLAGS, *ENGINE_FLAGS, *FILTER_KEYS, *GROUP_KEYS, *MODEL_KEYS, *TOP_NAMES, *TOP_PARTS}
    | {"on_startup", "preload", "m", "a/b", "nonsense"}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["5m", "20%", "32GB", "${env.X}", "${MODEL_ID}", "m", "a/b", "/x", "auto"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    ),
    max_leaves=6,
)
DOCUMENTS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6)


def take(text: str) -> None:
    """Read a document the whole way to settings."""
    try:
        file = parse_file(parse_yaml(text, "c.yaml"), Path("/c.yaml"), {"X": "1"})
        resolve(Layers(flags={}, environment={}, file=file), MACHINE)
    except ConfigError as error:
        assert str(error)
        assert "\n" not in str(error)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(document=DOCUMENTS)
def test_any_document_is_taken_or_refused_in_a_sentence(document: dict[str, Any]) -> None:
    take(yaml.safe_dump(document))


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_is_taken_or_refused_in_a_sentence(text: str) -> None:
    take(text)
