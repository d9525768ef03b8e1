"""Any configuration is either taken or refused in a sentence; nothing else ever comes out."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
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
    read_file,
)
from mlx_isolate_supervisor.settings.layers import Layers, Machine, resolve
from mlx_isolate_supervisor.settings.llama_swap import import_llama_swap
from mlx_isolate_supervisor.settings.yaml_text import parse_yaml
from tests.material.damaged_bytes import damaged

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


@settings(max_examples=25)
@given(document=DOCUMENTS)
def test_any_document_is_taken_or_refused_in_a_sentence(document: dict[str, Any]) -> None:
    take(yaml.safe_dump(document))


@settings(max_examples=60)
@given(text=st.text(max_size=60))
def test_any_text_is_taken_or_refused_in_a_sentence(text: str) -> None:
    take(text)


OURS = b"""\
healthCheckTimeout: 120
globalTTL: 1800
apiKeys: ["${env.X}"]
memory_budget_gb: 48
macros:
  store: /models
models:
  small:
    path: /models/small
    aliases: [qwen]
    ttl: 600
    env: ["HF_HUB_OFFLINE=1"]
    concurrencyLimit: 8
    filters:
      stripParams: "temperature, top_p"
      setParams: {top_k: 20}
    max_tokens: 2048
  big:
    path: "${store}/${MODEL_ID}"
groups:
  resident: {swap: false, exclusive: false, persistent: true, members: [small]}
hooks:
  on_startup: {preload: [small]}
"""
THEIRS = OURS.replace(
    b"path: /models/small", b"cmd: mlx_lm.server --model /models/small --port ${PORT} --temp 0.5"
).replace(b'path: "${store}/${MODEL_ID}"', b"cmd: python -m mlx_lm server --model '${store}/b'")
NASTY = {
    "nothing": b"",
    "NULs": bytes(5000),
    "no UTF-8": b"models: {\xff\xfe: 1}",
    "a weight file": bytes(range(256)) * 8192,
    "a bomb of aliases": b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nmodels: *c\n",
    "an alias of itself": b"models: &a {x: *a}\n",
    "deep brackets": b"models: " + b"[" * 50_000,
    "deep braces": b"{a: " * 20_000,
    "deep indents": b"".join(b" " * at + b"a:\n" for at in range(600)),
    "a Python object": b"models: !!python/object/apply:os.system [id]\n",
    "a merge": b"models: {<<: {a: 1}}\n",
    "a huge number": b"ttl: " + b"9" * 5000,
    "a number in sixties": b"ttl: 1:" + b"59:" * 3000 + b"59",
    "a date out of range": b"ttl: 2001-99-99\n",
    "no numbers": b"ttl: .nan\nmemory_budget_gb: .inf\n",
    "a date where JSON is wanted": b"models: {m: {chat_template_args: {a: 2001-01-01}}}\n",
    "a date for a key": b"models: {m: {chat_template_args: {2001-01-01: 1}}}\n",
    "bytes where JSON is wanted": b"models: {m: {chat_template_args: {a: !!binary aGk=}}}\n",
    "a set where JSON is wanted": b"models: {m: {chat_template_args: {a: !!set {x}}}}\n",
    "a list for keys": b"? [a, b]\n: 1\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "a macro of itself": b"macros: {a: '${a}'}\n",
    "macros that double": b"macros:\n  m0: xxxxxxxxxx\n"
    + b"".join(b"  m%d: '%s'\n" % (at, b"${m%d}" % (at - 1) * 10) for at in range(1, 12)),
    "a command without its end": b"models: {m: {cmd: 'mlx_lm.server \"'}}\n",
    "wrong kinds": b"models: [1]\ngroups: 7\nhooks: x\nmacros: [2]\n",
    "wrong kinds within": b"models: {m: 3}\ngroups: {g: {members: 5}}\nhooks: {on_startup: [1]}\n",
}


def take_file(path: Path, content: bytes) -> None:
    """Read a file as a configuration and as one to import; a sentence may refuse it."""
    path.write_bytes(content)
    for read in (read_file, import_llama_swap):
        try:
            file = read(path, {"X": "1"})
            if read is read_file:
                resolve(Layers(flags={}, environment={}, file=file), MACHINE)  # type: ignore[arg-type]
        except ConfigError as error:
            assert str(error)
            assert len(str(error)) < 1000


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", NASTY)
def test_a_hostile_file_is_taken_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    take_file(tmp_path / "c.yaml", NASTY[name])


@pytest.mark.parametrize(
    "text",
    [
        r'models: {m: {filters: {setParams: {a: "\ud800"}}}}',
        r'models: {m: {env: {A: "\ud800"}}}',
        r'models: {m: {path: "\ud800"}}',
        "models: {m: {filters: {setParams: {a: {~: 1}}}}}",
        "models: {m: {filters: {setParams: {a: !!set {x}}}}}",
        "models: {m: {filters: {setParams: {temperature: .inf}}}}",
    ],
)
def test_what_no_engine_could_be_told_is_refused_where_it_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        parse_yaml(text, "c.yaml")


def fuzz(path: Path, examples: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(examples):
        take_file(path, damaged(chance, chance.choice((OURS, THEIRS))))


def test_150_damaged_files_are_taken_or_refused_in_a_sentence(tmp_path: Path) -> None:
    fuzz(tmp_path / "c.yaml", 150, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_20000_damaged_files_are_taken_or_refused_in_a_sentence(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    fuzz(tmp_path / "c.yaml", 20_000, seed)
