"""Writes Medusa heads for the demo model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.engine.speculation.requests import MODEL

HIDDEN_SIZE, VOCAB_SIZE = 256, 2048
Tensors = dict[str, torch.Tensor]


def make_heads(num_heads: int, num_blocks: int = 1, *, has_lm_heads: bool = False, scale: float = 0.05) -> Tensors:
    """Return random heads."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = draw(HIDDEN_SIZE, HIDDEN_SIZE)
            tensors[f"{head}.{block}.linear.bias"] = draw(HIDDEN_SIZE)
        if has_lm_heads:
            tensors[f"{head}.{num_blocks}.weight"] = draw(VOCAB_SIZE, HIDDEN_SIZE)
    return tensors


def write_heads(folder: Path, tensors: Tensors, num_heads: int, num_blocks: int = 1) -> Path:
    """Write heads in the format of Medusa and LoRAX."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"medusa_num_heads": num_heads, "medusa_num_layers": num_blocks, "version": "2"})
    )
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def run_heads(tensors: Mapping[str, torch.Tensor], hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """Return the logits of all heads, `[heads, tokens, vocabulary]`, as Medusa defines them."""
    logits: list[torch.Tensor] = []
    while f"{len(logits)}.0.linear.weight" in tensors:
        head, block, x = len(logits), 0, hidden
        while f"{head}.{block}.linear.weight" in tensors:
            name = f"{head}.{block}.linear"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
            block += 1
        logits.append(x @ tensors.get(f"{head}.{block}.weight", lm_head).t())
    return torch.stack(logits)


def train_heads(texts: Sequence[Sequence[int]], num_heads: int, num_steps: int) -> Tensors:
    """Return heads that were trained to continue token sequences of the base model."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        hidden = [model.model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    shapes = make_heads(num_heads)
    tensors = {name: torch.zeros_like(tensor, requires_grad=True) for name, tensor in shapes.items()}
    lm_head, optimizer = model.lm_head.weight.detach(), torch.optim.Adam(tensors.values(), lr=0.003)
    inputs = torch.cat([states[: -num_heads - 1] for states in hidden])
    targets = [
        torch.cat([torch.tensor(text[head + 2 : len(text) - num_heads + head + 1]) for text in texts])
        for head in range(num_heads)
    ]
    for _ in range(num_steps):
        loss = F.cross_entropy(run_heads(tensors, inputs, lm_head).flatten(0, 1), torch.cat(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in tensors.items()}
