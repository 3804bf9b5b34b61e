import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels.packed import can_pack, pack, packed_linear
from tests.builders import CPU, needs_onednn


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 8, 8), (2, 16, 5), (7, 33, 65), (64, 128, 96), (600, 16, 5)]
)
def test_a_packed_product_is_the_plain_one(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    added = torch.randn(outputs, generator=generator) if bias else None
    torch.testing.assert_close(packed_linear(x, pack(weight), added), F.linear(x, weight, added), rtol=1e-5, atol=1e-4)


@needs_onednn
def test_views_are_packed_and_multiplied_as_what_they_show() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 20, generator=generator).t()  # not contiguous, as GPT-2's matrices
    x = torch.randn(5, 30, generator=generator)[:, 4:16]
    torch.testing.assert_close(packed_linear(x, pack(weight), None), x @ weight.t(), rtol=1e-5, atol=1e-5)


@needs_onednn
def test_packing_copies() -> None:
    weight, x = torch.ones(4, 4), torch.ones(2, 4)
    packed = pack(weight)
    weight.zero_()
    assert torch.equal(packed_linear(x, packed, None), torch.full((2, 4), 4.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_only_float32_is_packed(dtype: torch.dtype) -> None:
    assert not can_pack(CPU, dtype)


def test_only_a_cpu_packs() -> None:
    assert not can_pack(torch.device("cuda"), torch.float32)
