"""The parrot: a tiny llama whose weights, set by hand, make it repeat what it finds earlier.

It is an induction head over 8-grams. After any context it looks for the earlier place whose
preceding tokens agree with its own last 7 tokens for the longest run, counted backwards, and says
the token that followed there. So, greedily and with probabilities near 1:

* with an assistant turn in the conversation whose user turn ended alike, it repeats that assistant
  turn token for token and ends with `<|end|>`;
* with no assistant turn yet, it repeats the user's turn and ends (the codes of `<|user|>` and
  `<|assistant|>` are neighbours, so one answers for the other);
* given plain text that repeats itself, it goes on for ever.

Keep every run of 7 tokens in what it shall repeat unique, or it may jump between the places; give
the last user turn and the user turn before the wanted answer the same last 5 tokens where there
are several assistant turns.

How it works. A token's code has three ones in 24 places (its number in base 8), so two different
codes agree by 2 / 3 at most. The residual stream holds 9 blocks of 24 (the token, the 6 + 1 before
it, the prediction) and one constant. Three layers with one head each look back exactly 1, 2 and 4
tokens by rotary phases alone and copy 1, 2 and 4 blocks; the fourth compares blocks 0..6 of the
query with blocks 1..7 of each key, near tokens weighing 5 times as much as the next farther ones,
and copies block 0 of the place it finds into the prediction. The rotary base is so large that only
the first pairs of dimensions turn at all; contents lie in the others, heavy ones last.
"""

from typing import Any

import numpy as np

from tests.material.tokenizer import ASSISTANT, USER, VOCAB_SIZE

Weights = dict[str, np.ndarray[Any, Any]]
Matrix = np.ndarray[Any, np.dtype[np.float32]]

CODE = 24
# Shares digits with few tokens in use, and never two with one that also looks like `<|user|>`.
NEVER_USED = 0o733
BLOCKS = 8
HISTORY = 7
PREDICTION = BLOCKS * CODE
CONSTANT = PREDICTION + CODE
HIDDEN = 224
HEAD = 224
PAIRS = HEAD // 2
# Pairs of dimensions from here on do not turn within any context (1e38 ** (-28 / 112) = 3e-10).
STILL_PAIR = 28
ROPE_BASE = 1e38
NORM_EPS = 1e-6
LOOK_BACK = (1, 2, 4)
# Sharpness in logits: the next best place is at least 0.59 * 100 away in the looking-back layers,
# and 300 in the comparing one, where the smallest difference is a third of 5 ** -6.
LOOK_SHARPNESS = 100.0
MATCH_SHARPNESS = 300.0 * 3 * 5.0**6
OUTPUT_SCALE = 30.0


def parrot_config(context: int) -> dict[str, Any]:
    """config.json of the parrot."""
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(LOOK_BACK) + 1,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_BASE,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    }


def parrot_weights() -> Weights:
    """The weights, float32."""
    codes = token_codes()
    embedding = np.zeros((VOCAB_SIZE, HIDDEN), dtype=np.float32)
    embedding[:, :CODE] = codes
    embedding[:, CONSTANT] = 1.0
    output = np.zeros((VOCAB_SIZE, HIDDEN), dtype=np.float32)
    output[:, PREDICTION : PREDICTION + CODE] = codes * OUTPUT_SCALE
    ones = [1, 2, 4, BLOCKS]
    weights: Weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": output,
        # The final stream: all blocks, the constant, and a sharp prediction.
        "model.norm.weight": _undo_norm(3 * (BLOCKS + 1) + 1),
    }
    for layer in range(len(LOOK_BACK) + 1):
        if layer < len(LOOK_BACK):
            projections = _looking_back(LOOK_BACK[layer])
        else:
            projections = _comparing()
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.{name}_proj.weight": matrix for name, matrix in projections.items()
        }
        weights[f"{prefix}input_layernorm.weight"] = _undo_norm(3 * ones[layer] + 1)
        weights[f"{prefix}post_attention_layernorm.weight"] = np.ones(HIDDEN, dtype=np.float32)
        weights |= {
            f"{prefix}mlp.gate_proj.weight": np.zeros((8, HIDDEN), dtype=np.float32),
            f"{prefix}mlp.up_proj.weight": np.zeros((8, HIDDEN), dtype=np.float32),
            f"{prefix}mlp.down_proj.weight": np.zeros((HIDDEN, 8), dtype=np.float32),
        }
    return weights


def token_codes() -> Matrix:
    """Codes of all tokens, [VOCAB_SIZE, 24]: ones at the token's three digits in base 8.

    `<|assistant|>` alone is none of these: it lies between `<|user|>` and a token that is never
    used, nearer to `<|user|>` than two tokens with two equal digits are to each other.
    """
    codes = np.zeros((VOCAB_SIZE, CODE), dtype=np.float32)
    for token in range(VOCAB_SIZE):
        for place, digit in enumerate((token >> 6, (token >> 3) & 7, token & 7)):
            codes[token, 8 * place + digit] = 1.0
    codes[ASSISTANT] = 0.75 * codes[USER] + (1 - 0.75**2) ** 0.5 * codes[NEVER_USED]
    return codes


def _undo_norm(squares: int) -> Matrix:
    """Norm weights that give the stream back as it was: its squares are known to sum to this."""
    return np.full(HIDDEN, np.sqrt(squares / HIDDEN + NORM_EPS), dtype=np.float32)


def _looking_back(distance: int) -> dict[str, Matrix]:
    """A head that attends to the token `distance` back and copies its blocks `distance` on."""
    pairs = np.arange(STILL_PAIR)
    turn = distance * ROPE_BASE ** (-pairs / PAIRS)
    queries = np.zeros((HEAD, HIDDEN), dtype=np.float32)
    keys = np.zeros((HEAD, HIDDEN), dtype=np.float32)
    # mlx turns dimension i together with i + HEAD / 2.
    amplitude = LOOK_SHARPNESS * HEAD**0.5
    queries[pairs, CONSTANT] = amplitude * np.cos(turn)
    queries[pairs + PAIRS, CONSTANT] = -amplitude * np.sin(turn)
    keys[pairs, CONSTANT] = 1.0
    size = distance * CODE
    values = np.zeros((HEAD, HIDDEN), dtype=np.float32)
    values[:size, :size] = np.eye(size)
    outputs = np.zeros((HIDDEN, HEAD), dtype=np.float32)
    outputs[size : 2 * size, :size] = np.eye(size)
    return {"q": queries, "k": keys, "v": values, "o": outputs}


def _comparing() -> dict[str, Matrix]:
    """The head that finds the longest agreement and copies the token there as the prediction."""
    dimensions = _still_dimensions()
    queries = np.zeros((HEAD, HIDDEN), dtype=np.float32)
    keys = np.zeros((HEAD, HIDDEN), dtype=np.float32)
    for back in range(HISTORY):
        weight = MATCH_SHARPNESS * HEAD**0.5 * 5.0**-back / 3
        # The farthest token has the least weight and takes the pairs that turn the most.
        part = dimensions[(HISTORY - 1 - back) * CODE : (HISTORY - back) * CODE]
        for place, dimension in enumerate(part):
            queries[dimension, back * CODE + place] = weight**0.5
            keys[dimension, (back + 1) * CODE + place] = weight**0.5
    values = np.zeros((HEAD, HIDDEN), dtype=np.float32)
    values[:CODE, :CODE] = np.eye(CODE)
    outputs = np.zeros((HIDDEN, HEAD), dtype=np.float32)
    outputs[PREDICTION : PREDICTION + CODE, :CODE] = np.eye(CODE)
    return {"q": queries, "k": keys, "v": values, "o": outputs}


def _still_dimensions() -> list[int]:
    """Dimensions of a head that do not turn, those of faster pairs first."""
    return [dimension for pair in range(STILL_PAIR, PAIRS) for dimension in (pair, pair + PAIRS)]
