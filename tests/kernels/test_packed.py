from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lorax_server.kernels.packed import STRETCH, can_pack, pack, packed_linear
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


class Multiplied(TorchDispatchMode):
    """A record of the numbers of rows that oneDNN is given: it builds and keeps a kernel for each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_linear_pointwise" in str(func):
            self.rows.add(len(args[0]))
        return func(*args, **(kwargs or {}))


@needs_onednn
def test_batches_of_any_length_need_few_kernels() -> None:
    packed, multiplied = pack(torch.ones(3, 4)), Multiplied()
    with multiplied:
        for rows in range(2, 3 * STRETCH):
            assert packed_linear(torch.ones(rows, 4), packed, None).shape == (rows, 3)
    assert len(multiplied.rows) < 50


@needs_onednn
@pytest.mark.parametrize("rows", [2, 17, 33, 49, 97, 193, 385, 2 * STRETCH, 2 * STRETCH + 1])
def test_a_batch_is_filled_up_by_less_than_a_fifth(rows: int) -> None:
    with Multiplied() as multiplied:
        packed_linear(torch.ones(rows, 4), pack(torch.ones(3, 4)), None)
    assert max(multiplied.rows) < 1.2 * rows


@needs_onednn
def test_a_row_does_not_depend_on_how_many_are_filled_up() -> None:
    generator = torch.Generator().manual_seed(0)
    x, packed = torch.randn(40, 24, generator=generator), pack(torch.randn(9, 24, generator=generator))
    whole = packed_linear(x, packed, None)
    for rows in (37, 38, 39):
        assert torch.equal(packed_linear(x[:rows], packed, None), whole[:rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_only_float32_is_packed(dtype: torch.dtype) -> None:
    assert not can_pack(CPU, dtype)


def test_only_a_cpu_packs() -> None:
    assert not can_pack(torch.device("cuda"), torch.float32)
