"""transformers as the reference, one request at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


class Float8Cache(DynamicCache):
    """A cache that returns keys and values rounded to float8."""

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


class Request:
    """Computes logits for a prompt and the following tokens, with a KV cache."""

    def __init__(self, model: Any, tensors: dict[str, torch.Tensor]) -> None:
        self._model = model
        self._cache: Any = DynamicCache(config=model.config)
        if getattr(model.config, "quantize", None) == "fp8-kv":
            names = [f"model.layers.{layer}.self_attn" for layer in range(model.config.num_hidden_layers)]
            scales = [(float(tensors[f"{name}.k_scale"]), float(tensors[f"{name}.v_scale"])) for name in names]
            self._cache = Float8Cache(scales, model.config)

    def feed(self, ids: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor([list(ids)], device=self._model.device)
        return self._model(tokens, past_key_values=self._cache, use_cache=True).logits[0]  # type: ignore[no-any-return]

    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        """Feed the prompt and freeze length-dependent rotary angles at the prompt length, as the server does."""
        logits = self.feed(prompt)
        self._rotary = _rotary(self._model)
        if self._rotary is not None:
            self._kind, self._rotary.rope_type = self._rotary.rope_type, "default"  # disable frequency updates
        return logits

    def close(self) -> None:
        if self._rotary is not None:
            self._rotary.rope_type = self._kind
            _reset(self._rotary)


@torch.no_grad()
def oracle_logits(model: Any, ids: Sequence[int], prompt_length: int, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of every token. Tokens after the prompt are fed together, which is faster."""
    request = Request(model, tensors)
    logits = request.prefill(ids[:prompt_length])
    if len(ids) > prompt_length:
        logits = torch.cat([logits, request.feed(ids[prompt_length:])])
    request.close()
    return logits


def _rotary(model: Any) -> Any:
    return next((module for module in model.modules() if isinstance(getattr(module, "rope_type", None), str)), None)


def _reset(rotary: Any) -> None:
    """Reset the rotary embedding for the next request."""
    rotary.inv_freq = rotary.original_inv_freq.clone()
    rotary.max_seq_len_cached = rotary.original_max_seq_len


@torch.no_grad()
def oracle_greedy(model: Any, prompt: Sequence[int], count: int, tensors: dict[str, torch.Tensor]) -> list[int]:
    """Return the greedy tokens of one request, up to the first near tie."""
    request, tokens = Request(model, tensors), list[int]()
    last = request.prefill(prompt)[-1]
    for _ in range(count):
        first, second = last.topk(2).values
        if first - second < 1e-4:
            break
        tokens.append(int(last.argmax()))
        last = request.feed(tokens[-1:])[-1]
    request.close()
    return tokens


def oracle_text(model: Any, prompt: Sequence[int], ours: Sequence[int], tensors: dict[str, torch.Tensor]) -> list[int]:
    """Return the greedy tokens of one request, as `oracle_greedy` does, up to the first difference from `ours`.

    All tokens of `ours` are fed together, which is faster.
    """
    logits = oracle_logits(model, [*prompt, *ours[:-1]], len(prompt), tensors)[len(prompt) - 1 :]
    tokens = list[int]()
    for row, our_token in zip(logits, ours, strict=True):
        first, second = row.topk(2).values
        if first - second < 1e-4:
            break
        tokens.append(int(row.argmax()))
        if tokens[-1] != our_token:
            break
    return tokens
