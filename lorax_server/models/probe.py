"""Whether a model nobody has looked at can be trusted with padded batches: ask it."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lorax_server.errors import UnsupportedModelError
from lorax_server.models.past import LayerPast

Forward = Callable[..., tuple[torch.Tensor, list[LayerPast]]]

LONG, SHORT = 6, 2  # tokens of the two prompts
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the mean difference, by the spread of the logits
TOLERANCE = 0.05  # of other types


def takes(model: torch.nn.Module, parameter: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return parameter in inspect.signature(model.forward).parameters


def check_padding(forward: Forward, name: str, vocab_size: int, pad: int, dtype: torch.dtype, device: Any) -> None:
    """Run two prompts alone and padded in one batch, two steps each, and refuse a model that tells them apart.

    A model can ignore its mask or its positions, see the future, keep no past or keep one of another form: all of
    it shows here, and nowhere else before users see wrong answers.
    """
    tokens = torch.arange(LONG + 1, device=device).mul(7).add(3).remainder(vocab_size)
    prompts, then = [tokens[:LONG], tokens[LONG - SHORT : LONG]], tokens[LONG]
    try:
        alone = [_two_steps(forward, [prompt], then, pad) for prompt in prompts]
        together = _two_steps(forward, prompts, then, pad)
        at_once, _ = forward(tokens[None], torch.ones_like(tokens)[None], torch.arange(LONG + 1, device=device)[None])
    except Exception as error:  # whatever a model that is not made for this does
        raise UnsupportedModelError(f"{name}: cannot run in padded batches: {error}") from error
    found = {
        "when a shorter prompt is padded": (together, torch.cat(alone, dim=1)),
        "when another token follows": (at_once[0, -2:, None].float(), alone[0]),
    }
    for when, (logits, expected) in found.items():
        difference = ((logits - expected).abs().mean() / expected.std()).item()
        if not difference <= TOLERANCES.get(dtype, TOLERANCE):
            raise UnsupportedModelError(
                f"{name}: cannot run in padded batches: its logits change by {difference:.1%} of their spread {when}"
            )


def _two_steps(forward: Forward, prompts: Sequence[torch.Tensor], then: torch.Tensor, pad: int) -> torch.Tensor:
    """[2, rows, vocabulary] the logits after the prompts, and after one more token."""
    width = max(len(prompt) for prompt in prompts)
    ids = prompts[0].new_full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    first, past = forward(ids, mask, positions)
    _check_past(past, len(prompts), width)
    mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    second, past = forward(then.expand(len(prompts), 1), mask, positions[:, -1:] + 1, past)
    _check_past(past, len(prompts), width + 1)
    return torch.stack([first[:, -1], second[:, -1]]).float()


def _check_past(past: Sequence[LayerPast], rows: int, columns: int) -> None:
    if not past:
        raise ValueError("it keeps no keys and values")
    for keys, values in past:
        if any((part.shape[0], part.shape[2]) != (rows, columns) for part in (keys, values)):
            raise ValueError(f"a layer keeps {tuple(keys.shape)} keys after {columns} tokens of {rows} prompts")
