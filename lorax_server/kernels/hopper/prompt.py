"""Launch the LoRA of prompts. Triton multiplies by A; what follows is here."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lorax_server.kernels.hopper.arguments import PROMPT_THREADS, PromptArgs, SumArgs
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.sources import PROMPT_COLUMNS, PromptVariant
from lorax_server.kernels.ops import LinearWeights, LoraBatch, LoraTarget
from lorax_server.kernels.triton.prompt import shrink
from lorax_server.kernels.triton.tiles import prompt_tiles

TILE_TOKENS = 128


def linear(
    kernels: Kernels, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch, targets: Sequence[LoraTarget]
) -> torch.Tensor:
    """Write what adapters add, and the bias, and let the product add itself to it."""
    out = torch.empty(len(x), weights.plain.shape[0], dtype=x.dtype, device=x.device)
    args = _args(out, _low_rank(kernels, x, lora, targets), lora, targets)
    args.bias = 0 if weights.bias is None else weights.bias.data_ptr()
    blocks = sum(-(-width // PROMPT_COLUMNS) for width in args.N)
    _launch(kernels, PromptVariant(x.dtype, "expand_prompt"), blocks, args, lora)
    return out.addmm_(x, weights.plain.t())


def gated_linear(
    kernels: Kernels,
    x: torch.Tensor,
    weights: LinearWeights,
    activation: str,
    lora: LoraBatch,
    targets: Sequence[LoraTarget],
) -> torch.Tensor:
    """Let the activation add what adapters change of gate and up, for no traffic of its own."""
    low_rank = _low_rank(kernels, x, lora, targets)
    gate_up = F.linear(x, weights.plain, weights.bias)
    width = gate_up.shape[1] // 2
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    args = _args(gate_up, low_rank, lora, targets)
    args.out = out.data_ptr()
    _launch(kernels, PromptVariant(x.dtype, "gate_prompt", activation), -(-width // PROMPT_COLUMNS), args, lora)
    return out


def _low_rank(kernels: Kernels, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> torch.Tensor:
    """Return the scaled products with A, `[tokens, slices, room]`."""
    parts = shrink(x, lora, targets).v
    count, tokens, slices, room = parts.shape
    v = torch.empty(tokens, slices, room, dtype=x.dtype, device=x.device)
    args = SumArgs(
        parts.data_ptr(),
        v.data_ptr(),
        lora.adapter_indices.data_ptr(),
        lora.table.data_ptr(),
        lora.scales.data_ptr(),
        count,
        tokens,
        slices,
        room,
        targets[0].index,
        lora.table.shape[1],
    )
    blocks = -(-v.numel() // (4 * PROMPT_THREADS))
    if blocks:
        kernels.get(PromptVariant(x.dtype, "sum_parts")).launch(blocks, PROMPT_THREADS, [args], early=True)
    return v


def _args(y: torch.Tensor, low_rank: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> PromptArgs:
    args = PromptArgs(v=low_rank.data_ptr(), buffer=lora.buffer.data_ptr(), y=y.data_ptr())
    args.tiles, args.table = prompt_tiles(lora, TILE_TOKENS).data_ptr(), lora.table.data_ptr()
    args.target, args.num_targets = targets[0].index, lora.table.shape[1]
    args.y_stride, args.slices, args.room = y.stride(0), len(targets), low_rank.shape[2]
    args.N[: len(targets)] = [target.columns.stop - target.columns.start for target in targets]
    return args


def _launch(kernels: Kernels, variant: PromptVariant, blocks: int, args: PromptArgs, lora: LoraBatch) -> None:
    tiles = len(prompt_tiles(lora, TILE_TOKENS))
    kernels.get(variant).launch((blocks, tiles), PROMPT_THREADS, [args], early=True)
