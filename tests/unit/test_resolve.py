"""Every setting is checked before it reaches mlx-lm."""

import math
from typing import Any

import pytest

from mlx_isolate_engine.completion.request import (
    CompletionRequest,
    SamplingRequest,
    TextPrompt,
)
from mlx_isolate_engine.completion.resolve import (
    check_adapter,
    check_request,
    resolve_draft_tokens,
    resolve_max_tokens,
    resolve_sampling,
)
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import RequestError

VOCABULARY = 512
SETTINGS = EngineSettings(temp=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=100)


def resolve(**fields: Any) -> Any:
    return resolve_sampling(SamplingRequest(**fields), SETTINGS, VOCABULARY)


def test_what_a_request_leaves_out_comes_from_the_settings() -> None:
    plan = resolve()
    assert (plan.temperature, plan.top_p, plan.top_k, plan.min_p) == (0.5, 0.9, 7, 0.1)
    assert plan.seed is None


def test_a_request_goes_over_the_settings() -> None:
    plan = resolve(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    assert (plan.temperature, plan.top_p, plan.top_k, plan.min_p) == (0.0, 1.0, 0, 0.0)


@pytest.mark.parametrize("top_k", [-1, 0, VOCABULARY, VOCABULARY + 1, 10**12])
def test_a_top_k_that_filters_nothing_is_off(top_k: int) -> None:
    assert resolve(top_k=top_k).top_k == 0


def test_a_repetition_penalty_of_zero_or_one_is_none() -> None:
    assert resolve(repetition_penalty=0.0).repetition_penalty == 1.0
    assert resolve(repetition_penalty=1.0).repetition_penalty == 1.0


def test_a_top_p_of_zero_is_greedy() -> None:
    assert resolve(top_p=0.0, temperature=1.0).temperature == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 2.0),
        ("top_p", -0.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("xtc_probability", 1.1),
        ("xtc_threshold", 0.6),
        ("repetition_penalty", -1.0),
        ("repetition_context_size", -1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("frequency_context_size", -5),
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: math.nan}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(**{name: value})
    assert caught.value.param == name
    assert caught.value.status == 400


@pytest.mark.parametrize("seed", [0, -1, 2**64 + 5, 123])
def test_a_seed_is_taken_modulo_64_bits(seed: int) -> None:
    assert resolve(seed=seed).seed == seed % 2**64


@pytest.mark.parametrize(
    ("asked", "prompt", "result"),
    [
        (None, 10, 100),
        (5, 10, 5),
        (-1, 10, 990),
        (10**9, 10, 990),
        (None, 950, 50),
        (7, 999, 1),
    ],
)
def test_max_tokens_is_what_was_asked_within_the_context(
    asked: int | None, prompt: int, result: int
) -> None:
    assert resolve_max_tokens(asked, SETTINGS, prompt, 1000) == result


@pytest.mark.parametrize("asked", [0, -2])
def test_max_tokens_that_mean_nothing_are_refused(asked: int) -> None:
    with pytest.raises(RequestError) as caught:
        resolve_max_tokens(asked, SETTINGS, 10, 1000)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_what_cannot_be_done_is_refused_not_ignored(fields: dict[str, Any], param: str) -> None:
    request = CompletionRequest(request_id="r", prompt=TextPrompt(text="x"), **fields)
    with pytest.raises(RequestError) as caught:
        check_request(request)
    assert caught.value.param == param


def test_an_adapter_that_is_not_configured_is_refused_by_name() -> None:
    check_adapter(None, ())
    check_adapter("polite", {"polite": ""})
    for name, names in (("polite", ()), ("/tmp/polite", ("polite", "terse"))):
        with pytest.raises(RequestError, match="No adapter of that name") as caught:
            check_adapter(name, names)
        assert (caught.value.status, caught.value.param) == (400, "adapters")
        assert caught.value.code == "adapter_not_found"


def with_draft(**fields: Any) -> CompletionRequest:
    return CompletionRequest(request_id="r", prompt=TextPrompt(text="x"), **fields)


def test_the_configured_draft_model_is_used_by_its_name() -> None:
    settings = EngineSettings(draft_model="/models/small", num_draft_tokens=4)
    for request, tokens in (
        (with_draft(), 4),
        (with_draft(draft_model="small", num_draft_tokens=2), 2),
        (with_draft(top_logprobs=0), 0),
    ):
        assert resolve_draft_tokens(request, settings, can_draft=True) == tokens
    assert resolve_draft_tokens(with_draft(), settings, can_draft=False) == 0


@pytest.mark.parametrize("name", ["other", "/models/small", "../small"])
def test_another_draft_model_or_a_path_is_refused(name: str) -> None:
    settings = EngineSettings(draft_model="/models/small")
    with pytest.raises(RequestError) as caught:
        resolve_draft_tokens(with_draft(draft_model=name), settings, can_draft=True)
    assert caught.value.param == "draft_model"


def test_without_a_draft_model_its_fields_are_refused() -> None:
    for fields in ({"draft_model": "small"}, {"num_draft_tokens": 3}):
        with pytest.raises(RequestError):
            resolve_draft_tokens(with_draft(**fields), SETTINGS, can_draft=True)
