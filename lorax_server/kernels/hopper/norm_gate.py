"""Launches RMSNorm and gated activation kernels."""

import torch

from lorax_server.kernels.hopper.arguments import GateArgs, NormArgs
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.linear import LoraPlan
from lorax_server.kernels.hopper.sources import GATE_THREADS, GateVariant, NormVariant
from lorax_server.kernels.ops import LoraBatch, LoraTarget

NORM_THREADS = 1024
MAX_CHUNKS = 4


def can_norm(x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Return True if the kernel supports this norm. The rows must be contiguous and fit into one thread block."""
    return (
        x.dim() == 2
        and x.shape[1] % 8 == 0
        and x.shape[1] <= NORM_THREADS * 8 * MAX_CHUNKS
        and x.is_contiguous()
        and (residual is None or residual.is_contiguous())
    )


def norm_variant(dtype: torch.dtype, width: int) -> NormVariant:
    return NormVariant(dtype, -(-width // (NORM_THREADS * 8)))


def rms_norm(
    kernels: Kernels,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: torch.Tensor,
    adapters: tuple[LoraBatch, LoraPlan, LoraTarget] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    args = NormArgs(x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(), eps=eps.data_ptr(), n=width)
    if residual is not None:
        args.residual, args.total = residual.data_ptr(), total.data_ptr()
    if adapters is not None:
        lora, plan, target = adapters
        args.buffer, args.table = lora.buffer.data_ptr(), lora.table.data_ptr()
        args.adapters, args.flags = lora.adapter_indices.data_ptr(), plan.flags[target.index].data_ptr()
        args.target, args.num_targets = target.index, lora.table.shape[1]
    variant = norm_variant(x.dtype, width)
    threads = -(-width // (8 * variant.chunks * 32)) * 32
    kernels.get(variant).launch(rows, threads, [args], early=True)
    return out, total


def apply_gate(kernels: Kernels, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    args = GateArgs(gate_up.data_ptr(), out.data_ptr(), width)
    blocks = rows * -(-width // (GATE_THREADS * 8))
    kernels.get(GateVariant(gate_up.dtype, activation)).launch(blocks, GATE_THREADS, [args], early=True)
    return out
