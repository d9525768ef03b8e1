"""A tiny Gemma 3 in a GGUF file, for the demo's conversion in milliseconds instead of a minute."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mlx_isolate_engine.model.demo_source import DemoSource, GemmaShape
from mlx_isolate_engine.model.demo_tokenizer import BYTE, CONTROL, NORMAL, USER_DEFINED, Vocabulary
from mlx_isolate_engine.model.demo_weights import shards
from mlx_isolate_shared.wire import Loading

SHAPE = GemmaShape(
    hidden=64,
    layers=14,
    ffn=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    vocab=640,
    window=16,
    context=512,
)

_WORDS = (
    "th he in er an re on the ing and ▁t ▁a ▁the ▁and aa aaa aaaa ▁s ▁sea sea ee ss 世 界 世界 é"
)


def vocabulary() -> Vocabulary:
    """Gemma's layout in small: markers, whole tokens, 256 bytes at 238, then pieces by score."""
    texts = [f"<unused{number}>" for number in range(SHAPE.vocab)]
    types = [CONTROL] * SHAPE.vocab
    scores = [-1000.0] * SHAPE.vocab
    markers = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>"}
    markers |= {105: "<start_of_turn>", 106: "<end_of_turn>"}
    for number, text in markers.items():
        texts[number] = text
    whole = ["[multimodal]", "\n", "\n\n", "  ", "   ", "<table>"]
    for number, text in zip([5, *range(107, 112)], whole, strict=True):
        texts[number], types[number] = text, USER_DEFINED
    for byte in range(256):
        texts[238 + byte], types[238 + byte], scores[238 + byte] = f"<0x{byte:02X}>", BYTE, 0.0
    letters = [chr(code) for code in range(33, 127)]
    pieces = list(dict.fromkeys([*_WORDS.split(), "▁", *letters]))
    for place, text in enumerate(pieces):
        number = 494 + place
        texts[number], types[number], scores[number] = text, NORMAL, -float(place)
    return Vocabulary(texts, scores, types)


def tensors(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Float32 values by their GGUF names; norms as the source stores them, one added."""
    source = np.random.default_rng(seed)
    values: dict[str, np.ndarray[Any, Any]] = {}
    for group in shards(SHAPE).values():
        for tensor in group:
            noise = source.standard_normal(tensor.shape).astype(np.float32)
            values[tensor.source] = 1 + noise / 8 if tensor.is_norm else noise / 8
    return values


def write_gguf(path: Path, seed: int = 0) -> None:
    """Write the file: matrices as Q8_0, norms as float32."""
    import gguf
    from gguf.quants import quantize

    writer = gguf.GGUFWriter(path, "gemma3")
    words = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words.texts)
    writer.add_token_scores(words.scores)
    writer.add_token_types(words.types)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, values in tensors(seed).items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_source(path: Path) -> DemoSource:
    """The source whose file `write_gguf` has written to `path`."""
    content = path.read_bytes()

    def assemble(target: Path) -> None:
        shutil.copyfile(path, target)

    return DemoSource(
        name="tiny",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        shape=SHAPE,
        assemble=assemble,
        package="tiny==1",
    )


def quiet(_: Loading) -> None:
    """A conversion's progress, of which nobody is told."""
