"""transformers as the oracle, one request at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


class Float8Cache(DynamicCache):
    """Keys and values as a float8 cache gives them back."""

    def __init__(self, scales: Sequence[tuple[float, float]], config: Any) -> None:
        super().__init__(config=config)
        self.scales = scales

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        k_scale, v_scale = self.scales[layer_idx]
        return super().update(
            through_float8(key_states, k_scale), through_float8(value_states, v_scale), layer_idx, *args, **kwargs
        )


def through_float8(x: torch.Tensor, scale: float) -> torch.Tensor:
    limit = torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).clamp(-limit, limit).to(torch.float8_e4m3fn).float() * scale


@torch.no_grad()
def oracle_logits(model: Any, ids: Sequence[int], prompt_length: int, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of every token of one request: a prompt, then one token at a time.

    Rotary angles that depend on the length stay those of the prompt, as they do for a request that is served.
    """
    device = model.device
    tokens = torch.tensor([list(ids)], device=device)
    cache: Any = DynamicCache(config=model.config)
    if getattr(model.config, "quantize", None) == "fp8-kv":
        names = [f"model.layers.{layer}.self_attn" for layer in range(model.config.num_hidden_layers)]
        cache = Float8Cache(
            [(float(tensors[f"{name}.k_scale"]), float(tensors[f"{name}.v_scale"])) for name in names], model.config
        )
    rotary = _rotary(model)
    kind = None if rotary is None else rotary.rope_type
    logits = [model(tokens[:, :prompt_length], past_key_values=cache, use_cache=True).logits[0]]
    if rotary is not None:
        rotary.rope_type = "default"  # no more updates of its frequencies
    for position in range(prompt_length, len(ids)):
        step = tokens[:, position : position + 1]
        logits.append(model(step, past_key_values=cache, use_cache=True).logits[0])
    if rotary is not None:
        rotary.rope_type = kind
        _reset(rotary)
    return torch.cat(logits)


def _rotary(model: Any) -> Any:
    return next((module for module in model.modules() if hasattr(module, "rope_type")), None)


def _reset(rotary: Any) -> None:
    """A fresh model: nothing of this request's length is left for the next."""
    rotary.inv_freq = rotary.original_inv_freq.clone()
    rotary.max_seq_len_cached = rotary.original_max_seq_len


@torch.no_grad()
def oracle_greedy(model: Any, prompt: Sequence[int], count: int, tensors: dict[str, torch.Tensor]) -> list[int]:
    """Greedy tokens of one request, up to where two tokens are so close that rounding may decide."""
    tokens: list[int] = []
    for _ in range(count):
        last = oracle_logits(model, [*prompt, *tokens], len(prompt), tensors)[-1]
        first, second = last.topk(2).values
        if first - second < 1e-4:
            break
        tokens.append(int(last.argmax()))
    return tokens
