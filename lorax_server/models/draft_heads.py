"""Medusa heads, which guess the tokens after the next token from the last hidden state."""

from pathlib import Path
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from lorax_server.errors import ConfigError, WeightsError
from lorax_server.files.draft_heads import read_draft_head_sizes
from lorax_server.files.names import DRAFT_HEADS_FILE
from lorax_server.layers.linear import MultiAdapterHead
from lorax_server.weights import Placement, Weights, open_file

MAX_LOGIT_ROWS = 64  # rows of logits at a time, to limit temporary memory


class _Linear(nn.Module):
    """A linear layer without adapters."""

    def __init__(self, weights: Weights, name: str, outputs: int, inputs: int, *, bias: bool) -> None:
        super().__init__()
        self.ops = weights.ops
        matrix = weights.get_tensor(f"{name}.weight", (outputs, inputs))
        self.linear = self.ops.make_linear(matrix, weights.get_tensor(f"{name}.bias", (outputs,)) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.linear, None, ())


class DraftHeads(nn.Module):
    """The heads of one base model. Head `i` guesses the token `i + 2` positions after the token of a hidden state.

    A head consists of residual blocks, and either its own LM head or the model's LM head. The blocks and own LM heads
    are not sharded.
    """

    def __init__(
        self,
        weights: Weights,
        num_heads: int,
        num_blocks: int,
        hidden_size: int,
        vocab_size: int,
        *,
        has_lm_heads: bool,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                _Linear(weights, f"{head}.{block}.linear", hidden_size, hidden_size, bias=True)
                for block in range(num_blocks)
            )
            for head in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(
            _Linear(weights, f"{head}.{num_blocks}", vocab_size, hidden_size, bias=False)
            for head in range(num_heads if has_lm_heads else 0)
        )

    def __len__(self) -> int:
        return len(self.blocks)

    def forward(self, hidden: torch.Tensor, lm_head: MultiAdapterHead) -> torch.Tensor:
        """Return the guessed tokens, `[len(hidden), heads]`. `lm_head` is the model's LM head."""
        states = [self._run_blocks(head, hidden) for head in range(len(self))]
        if self.lm_heads:
            guesses = [own_head(state).argmax(-1) for own_head, state in zip(self.lm_heads, states, strict=True)]
        else:  # a small batch reads the weights of the LM head once for all heads
            parts = torch.cat(states).split(MAX_LOGIT_ROWS)
            guesses = [lm_head(rows)[0].argmax(-1) for rows in parts]
        return torch.cat(guesses).view(len(self), len(hidden)).t()

    def _run_blocks(self, head: int, x: torch.Tensor) -> torch.Tensor:
        blocks: Any = self.blocks[head]
        for block in blocks:
            x = x + F.silu(block(x))
        return x


def load_draft_heads(folder: Path, lm_head: MultiAdapterHead, **placement: Unpack[Placement]) -> DraftHeads:
    """Load the Medusa heads in a folder. Raise an error if they do not fit the model with this LM head."""
    num_heads, num_blocks = read_draft_head_sizes(folder)
    path = folder / DRAFT_HEADS_FILE
    tensors = open_file(path)
    own_heads = {name for head in range(num_heads) if (name := f"{head}.{num_blocks}.weight") in tensors}
    if len(own_heads) not in (0, num_heads):
        raise WeightsError(f"{path}: only {len(own_heads)} of {num_heads} heads have their own LM head")
    blocks = [f"{head}.{block}.linear" for head in range(num_heads) for block in range(num_blocks)]
    known = own_heads.union(*({f"{block}.weight", f"{block}.bias"} for block in blocks))
    if unknown := sorted(tensors.keys() - known):
        raise WeightsError(
            f"{path}: tensor {unknown[0]!r} does not belong to {num_heads} heads with {num_blocks} blocks each"
        )
    weights = Weights(tensors, source=str(path), **placement)
    hidden_size = lm_head.linear.shape[1]
    try:
        with torch.no_grad():
            heads = DraftHeads(
                weights, num_heads, num_blocks, hidden_size, lm_head.vocab_size, has_lm_heads=bool(own_heads)
            )
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{path}: GPU memory is not sufficient for the draft heads; omit draft_heads") from error
    return heads.eval()
