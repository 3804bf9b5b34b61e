"""The Triton kernel for routing compared with the reference."""

import math

import pytest
import torch

from lorax_server.kernels import RouterSpec, reference
from lorax_server.kernels.triton.router import route

CASES = {  # experts, experts per token, router, whether it has a bias
    "softmax": (128, 8, RouterSpec(normalize=True), False),
    "unnormalized": (60, 4, RouterSpec(normalize=False), False),
    "one expert": (6, 1, RouterSpec(normalize=True), False),
    "all experts": (3, 3, RouterSpec(normalize=True), False),
    "groups": (40, 3, RouterSpec(normalize=False, groups=5, top_groups=2, scale=16.0), False),
    "sigmoid": (9, 2, RouterSpec(normalize=False, scoring="sigmoid"), True),
    "sigmoid, groups": (160, 6, RouterSpec(True, "sigmoid", groups=8, top_groups=3, scale=2.5), True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_routing_matches_the_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    num_experts, top_k, spec, has_bias = CASES[name]
    draw = torch.Generator().manual_seed(1)
    # Equal scores can be ranked differently, so that the logits of a token are distinct in all dtypes.
    distinct = torch.stack([torch.randperm(num_experts, generator=draw) for _ in range(11)])
    logits = ((distinct - num_experts / 2) / 32).to(device, dtype)
    bias = torch.randn(num_experts, generator=draw).to(device) if has_bias else None
    routing, expected = route(logits, top_k, spec, bias), reference.route(logits, top_k, spec, bias)
    assert torch.equal(routing.experts, expected.experts)
    torch.testing.assert_close(routing.weights, expected.weights, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["softmax", "sigmoid, groups"])
def test_first_of_equal_experts_is_chosen(name: str, device: torch.device) -> None:
    num_experts, top_k, spec, _ = CASES[name]
    routing = route(torch.zeros(3, num_experts, device=device), top_k, spec)
    assert routing.experts.tolist() == [list(range(top_k))] * 3
    torch.testing.assert_close(routing.weights.cpu(), torch.full((3, top_k), spec.scale / top_k))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns about NaN
@pytest.mark.parametrize("name", ["softmax", "sigmoid, groups"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_padding_tokens_have_valid_and_distinct_experts(name: str, value: float, device: torch.device) -> None:
    num_experts, top_k, spec, _ = CASES[name]
    logits = torch.randn(2, num_experts, generator=torch.Generator().manual_seed(2)).to(device)
    expected = route(logits[1:], top_k, spec)
    logits[0] = value
    routing = route(logits, top_k, spec)
    chosen = routing.experts[0].tolist()
    assert len({*chosen}) == top_k
    assert set(chosen) <= set(range(num_experts))
    assert all(torch.equal(part[1:], other) for part, other in zip(routing, expected, strict=True))


def test_empty_batch_has_no_routing(device: torch.device) -> None:
    routing = route(torch.zeros(0, 8, device=device), 2, RouterSpec(normalize=True))
    assert routing.experts.shape == routing.weights.shape == (0, 2)
