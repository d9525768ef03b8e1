"""Why images are refused: what mlx-lm offers for them. Where that changes, so should the refusal."""

import mlx.core as mx
import pytest
from mlx_lm.models import muse_spark
from mlx_lm.processors import PROCESSORS

TINY = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e4},
    "layer_rope_theta": [1e4],
    "layer_types": ["full_attention"],
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "output_multiplier": 1.0,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_hidden_size": 64,
    "moe_intermediate_size": 64,
}


def test_mlx_lm_reads_images_for_one_family_only() -> None:
    assert set(PROCESSORS) == {"muse_spark"}


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_that_family_runs_on_nothing_but_metal() -> None:
    arguments = muse_spark.ModelArgs(model_type="muse_spark", text_config=TINY)
    model = muse_spark.Model(arguments)
    with pytest.raises(RuntimeError, match="Metal"):
        mx.eval(model(mx.array([[1, 2, 3]])))
