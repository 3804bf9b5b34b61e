"""Launch LoRA for prompts. Triton computes `V = x @ A.T` in parts; CUDA kernels sum the parts and multiply by B."""

from collections.abc import Sequence

import torch

from lorax_server.kernels.hopper.arguments import PROMPT_THREADS, PromptLoraArgs, SumPartsArgs
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.sources import PROMPT_COLUMNS, PromptLoraVariant
from lorax_server.kernels.ops import LinearWeights, LoraBatch, LoraTarget
from lorax_server.kernels.triton.lora_tiles import prompt_tiles
from lorax_server.kernels.triton.prompt_lora import shrink

TILE_TOKENS = 128


def linear(
    kernels: Kernels, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch, targets: Sequence[LoraTarget]
) -> torch.Tensor:
    """Return the linear layer's output. LoRA and the bias are written first, and then the base product is added."""
    out = torch.empty(len(x), weights.shape[0], dtype=x.dtype, device=x.device)
    args = _make_args(out, _shrink(kernels, x, lora, targets), lora, targets)
    args.bias = 0 if weights.bias is None else weights.bias.data_ptr()
    _launch_expand(kernels, PromptLoraVariant(x.dtype, "expand_prompt"), args, lora)
    return out.addmm_(x, weights.plain.t())


def add_lora(
    kernels: Kernels, out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]
) -> None:
    """Add LoRA to `out`, the base product."""
    args = _make_args(out, _shrink(kernels, x, lora, targets), lora, targets)
    _launch_expand(kernels, PromptLoraVariant(x.dtype, "add_prompt"), args, lora)


def gated_linear(
    kernels: Kernels,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    activation: str,
    lora: LoraBatch,
    targets: Sequence[LoraTarget],
) -> torch.Tensor:
    """Return `activation(gate) * up` with adapters applied to `gate_up`, the base product. The activation kernel also
    adds LoRA.
    """
    low_rank = _shrink(kernels, x, lora, targets)
    width = gate_up.shape[1] // 2
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    args = _make_args(gate_up, low_rank, lora, targets)
    args.out = out.data_ptr()
    _launch(kernels, PromptLoraVariant(x.dtype, "gate_prompt", activation), -(-width // PROMPT_COLUMNS), args, lora)
    return out


def _shrink(kernels: Kernels, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> torch.Tensor:
    """Return `V = x @ A.T` for each target, scaled and summed over its parts, `[tokens, targets, padded rank]`."""
    parts = shrink(x, lora, targets).v
    count, tokens, slices, padded_rank = parts.shape
    v = torch.empty(tokens, slices, padded_rank, dtype=x.dtype, device=x.device)
    args = SumPartsArgs(
        parts.data_ptr(),
        v.data_ptr(),
        lora.adapter_indices.data_ptr(),
        lora.table.data_ptr(),
        lora.scales.data_ptr(),
        count,
        tokens,
        slices,
        padded_rank,
        targets[0].index,
        lora.table.shape[1],
    )
    blocks = -(-v.numel() // (4 * PROMPT_THREADS))
    if blocks:
        kernels.get(PromptLoraVariant(x.dtype, "sum_parts")).launch(blocks, PROMPT_THREADS, [args], early=True)
    return v


def _make_args(
    y: torch.Tensor, low_rank: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]
) -> PromptLoraArgs:
    args = PromptLoraArgs(v=low_rank.data_ptr(), buffer=lora.buffer.data_ptr(), y=y.data_ptr())
    args.tiles, args.table = prompt_tiles(lora, TILE_TOKENS).data_ptr(), lora.table.data_ptr()
    args.target, args.num_targets = targets[0].index, lora.table.shape[1]
    args.y_stride, args.slices, args.padded_rank = y.stride(0), len(targets), low_rank.shape[2]
    args.N[: len(targets)] = [target.columns.stop - target.columns.start for target in targets]
    return args


def _launch(kernels: Kernels, variant: PromptLoraVariant, blocks: int, args: PromptLoraArgs, lora: LoraBatch) -> None:
    tiles = len(prompt_tiles(lora, TILE_TOKENS))
    kernels.get(variant).launch((blocks, tiles), PROMPT_THREADS, [args], early=True)


def _launch_expand(kernels: Kernels, variant: PromptLoraVariant, args: PromptLoraArgs, lora: LoraBatch) -> None:
    _launch(kernels, variant, sum(-(-width // PROMPT_COLUMNS) for width in args.N), args, lora)
