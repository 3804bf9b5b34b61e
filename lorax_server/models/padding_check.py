"""Check at load time that a model produces the same logits for padded batches and for single prompts."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lorax_server.errors import UnsupportedModelError
from lorax_server.kernels import LayerCache

Forward = Callable[..., tuple[torch.Tensor, list[LayerCache]]]

LONG_PROMPT_TOKENS, SHORT_PROMPT_TOKENS = 6, 2
MAX_DIFFERENCE_BY_DTYPE = {
    torch.float32: 1e-3,
    torch.float64: 1e-3,
}  # limit for the mean difference / standard deviation of the logits
MAX_DIFFERENCE = 0.05  # for other dtypes


def accepts_parameter(model: torch.nn.Module, parameter: str) -> bool:
    """Return True if the model's `forward` has this parameter."""
    return parameter in inspect.signature(model.forward).parameters


def check_padding(forward: Forward, name: str, vocab_size: int, pad: int, dtype: torch.dtype, device: Any) -> None:
    """Reject models whose logits differ between single prompts and a padded batch, over two steps.

    Such models ignore the mask or the positions, are not causal, or have an incompatible cache. They would silently
    generate wrong text.
    """
    tokens = torch.arange(LONG_PROMPT_TOKENS + 1, device=device).mul(7).add(3).remainder(vocab_size)
    prompts, next_token = (
        [tokens[:LONG_PROMPT_TOKENS], tokens[LONG_PROMPT_TOKENS - SHORT_PROMPT_TOKENS : LONG_PROMPT_TOKENS]],
        tokens[LONG_PROMPT_TOKENS],
    )
    try:
        alone = [_run_two_steps(forward, [prompt], next_token, pad) for prompt in prompts]
        together = _run_two_steps(forward, prompts, next_token, pad)
        one_step, _ = forward(
            tokens[None], torch.ones_like(tokens)[None], torch.arange(LONG_PROMPT_TOKENS + 1, device=device)[None]
        )
    except Exception as error:  # an incompatible model may raise any exception
        raise UnsupportedModelError(f"{name}: cannot run in padded batches: {error}") from error
    comparisons = {
        "when a shorter prompt is padded": (together, torch.cat(alone, dim=1)),
        "when another token follows": (one_step[0, -2:, None].float(), alone[0]),
    }
    for when, (logits, expected) in comparisons.items():
        difference = ((logits - expected).abs().mean() / expected.std()).item()
        if not difference <= MAX_DIFFERENCE_BY_DTYPE.get(dtype, MAX_DIFFERENCE):
            raise UnsupportedModelError(
                f"{name}: cannot run in padded batches: its logits change by {difference:.1%} of their spread {when}"
            )


def _run_two_steps(
    forward: Forward, prompts: Sequence[torch.Tensor], next_token: torch.Tensor, pad: int
) -> torch.Tensor:
    """Return logits `[2, rows, vocabulary]` of two steps: after the prompts, and after one more token."""
    width = max(len(prompt) for prompt in prompts)
    ids = prompts[0].new_full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    first, caches = forward(ids, mask, positions)
    _check_caches(caches, len(prompts), width)
    mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    second, caches = forward(next_token.expand(len(prompts), 1), mask, positions[:, -1:] + 1, caches)
    _check_caches(caches, len(prompts), width + 1)
    return torch.stack([first[:, -1], second[:, -1]]).float()


def _check_caches(caches: Sequence[LayerCache], rows: int, columns: int) -> None:
    if not caches:
        raise ValueError("the model returns no KV cache")
    for keys, values in caches:
        if any((tensor.shape[0], tensor.shape[2]) != (rows, columns) for tensor in (keys, values)):
            raise ValueError(f"a layer keeps {tuple(keys.shape)} keys after {columns} tokens of {rows} prompts")
