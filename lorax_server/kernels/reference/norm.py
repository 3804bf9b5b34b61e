"""Norms."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lorax_server.kernels.ops import LoraBatch, LoraTarget
from lorax_server.kernels.reference.lora import scale_and_shift


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: torch.Tensor,
    lora: LoraBatch | None = None,
    targets: Sequence[LoraTarget] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is not None:
        x = x + residual
    # Not F.rms_norm: it is slower on a CPU, and rounds once less than the models do in half precision.
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    normed = wide * scale
    normed = normed.to(x.dtype).mul_(weight) if weight.dtype == x.dtype else normed.mul_(weight).to(x.dtype)
    if lora is not None:
        scale_and_shift(normed, lora, targets)
    return normed, x


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    lora: LoraBatch | None = None,
    targets: Sequence[LoraTarget] = (),
) -> torch.Tensor:
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if lora is not None:
        scale_and_shift(normed, lora, targets)
    return normed
