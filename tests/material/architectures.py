"""Configurations and random weights of tiny models, one per kind of prompt cache.

The llama's shapes are written out, so that a test process that never imports mlx can build it; the
shapes of the others are asked of mlx-lm's own classes.
"""

import importlib
import math
from typing import Any

import numpy as np

from tests.material.tokenizer import VOCAB_SIZE

Weights = dict[str, np.ndarray[Any, Any]]

# Logits several units apart, so that greedy decoding seldom meets a near tie.
OUTPUT_SCALE = 4.0


def config_of(kind: str, hidden: int, layers: int, window: int) -> dict[str, Any]:
    """config.json of a kind, without context length, vocabulary and eos (added by the builder)."""
    attention = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
    }
    match kind:
        case "full":
            return {"model_type": "llama", "rope_theta": 10000.0} | attention
        case "sliding":
            extra = {
                "model_type": "gemma3_text",
                "query_pre_attn_scalar": hidden // 4,
                "sliding_window": window,
                "sliding_window_pattern": 2,
            }
            return attention | extra
        case "recurrent":
            return _mamba2(hidden, layers)
        case "hybrid":
            return attention | _qwen3_next(hidden)
        case "cache_list":
            return attention | _falcon_h1(hidden)
        case "shared_kv":
            return attention | _gemma4(hidden, layers, window)
        case _:
            raise ValueError(f"no such kind: {kind}")


def _mamba2(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "mamba2",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_heads": 4,
        "head_dim": hidden // 2,
        "state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "vocab_size": VOCAB_SIZE,
    }


def _qwen3_next(hidden: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": hidden,
        "moe_intermediate_size": hidden,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }


def _falcon_h1(hidden: int) -> dict[str, Any]:
    return {
        "model_type": "falcon_h1",
        "mamba_d_ssm": hidden,
        "mamba_d_head": 16,
        "mamba_n_heads": hidden // 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "lm_head_multiplier": 1.0,
        "rope_theta": 10000.0,
    }


def _gemma4(hidden: int, layers: int, window: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    return {
        "model_type": "gemma4_text",
        "global_head_dim": hidden // 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": layers // 2,
        "sliding_window": window,
        "layer_types": [kinds[layer % 2] for layer in range(layers)],
        "final_logit_softcapping": 30.0,
        "use_double_wide_mlp": False,
    }


def random_weights(kind: str, config: dict[str, Any], seed: int) -> Weights:
    """Float32 weights of `config`, the same bytes for the same seed.

    Matrices are normal with the spread that keeps activations near 1; vectors (norms, decay
    rates) keep the values that the architecture starts with.
    """
    initial = _llama_initial(config) if kind == "full" else _initial_of_mlx_lm(config)
    source = np.random.default_rng(seed)
    weights: Weights = {}
    for name in sorted(initial):
        value = initial[name]
        if value.ndim < 2:
            weights[name] = value.astype(np.float32)
            continue
        spread = 1.0 if "embed" in name else math.prod(value.shape[1:]) ** -0.5
        if name.endswith("lm_head.weight"):
            spread *= OUTPUT_SCALE
        normal = source.standard_normal(value.shape)
        weights[name] = np.multiply(normal, spread, dtype=np.float32, casting="same_kind")
    return weights


def _llama_initial(config: dict[str, Any]) -> Weights:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB_SIZE, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    return {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}


def _initial_of_mlx_lm(config: dict[str, Any]) -> Weights:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    return {name: np.array(value, copy=True) for name, value in tree_flatten(model.parameters())}
