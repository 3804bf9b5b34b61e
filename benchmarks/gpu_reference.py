"""Comparison of answers with transformers and PEFT, token by token.

The reference reads a prompt and our answer at once, in float32, and gives scores for every token of the answer. A token
is `gap` below the best one there. Rounding to 8 bits alone moves scores, so the same is asked of transformers in
bfloat16: the tokens that it would choose have gaps, too. Ours may be twice as far below the best as the furthest of
those. The comparison is made without the adapter as well, to show that it can fail.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

ALLOWED = 2.0  # times the furthest of the tokens that transformers chooses in bfloat16
LEAST = 1e-3  # is allowed, where these are all the best


class Sample(NamedTuple):
    """An answer, and the adapter that gave it."""

    adapter: str | None
    prompt: list[int]
    answer: list[int]


class Agreement(NamedTuple):
    """The tokens that agree, and those that would by mistake."""

    num_tokens: int
    num_equal: int  # tokens with the best score
    num_near: int  # tokens whose score is near the best
    mean_gap: float
    largest_gap: float
    tolerance: float
    peer_equal: int  # of the tokens that transformers chooses in bfloat16
    peer_mean_gap: float
    num_adapted: int  # tokens of adapters
    num_near_base: int  # tokens of these that would pass if the reference had no adapter


@torch.inference_mode()
def compare(folder: Path, samples: Sequence[Sample], model: Any = None) -> Agreement:
    """Compare answers with the folder's model, which is `model` if that is loaded. It is float32 after this."""
    model = load_model(folder / "model") if model is None else model
    chosen = [adapted.argmax(dim=1) for adapted, _ in _score_all(model, folder, samples)]
    ours, peers, base = [], [], []
    scores = _score_all(model.float(), folder, samples)
    for sample, best, (adapted, plain) in zip(samples, chosen, scores, strict=True):
        answer = torch.tensor(sample.answer)
        ours.append(_find_gaps(adapted, answer))
        peers.append(_find_gaps(adapted, best))
        base += [_find_gaps(plain, answer)] if sample.adapter is not None else []
    return _summarize(torch.cat(ours), torch.cat(peers), torch.cat([torch.empty(0), *base]))


def _summarize(ours: torch.Tensor, peers: torch.Tensor, base: torch.Tensor) -> Agreement:
    """Count gaps: of our tokens, of transformers' in bfloat16, and of ours if the reference had no adapter."""
    tolerance = max(ALLOWED * float(peers.max()), LEAST)
    return Agreement(
        num_tokens=len(ours),
        num_equal=int((ours <= 0).sum()),
        num_near=int((ours <= tolerance).sum()),
        mean_gap=float(ours.mean()),
        largest_gap=float(ours.max()),
        tolerance=tolerance,
        peer_equal=int((peers <= 0).sum()),
        peer_mean_gap=float(peers.mean()),
        num_adapted=len(base),
        num_near_base=int((base <= tolerance).sum()),
    )


def _score_all(model: Any, folder: Path, samples: Sequence[Sample]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the scores of each answer's tokens, with the adapter and without."""
    for sample in samples:
        if sample.adapter is None:
            plain = _score(model, sample)
            yield plain, plain
            continue
        adapter: Any = PeftModel.from_pretrained(
            model, folder / "adapters" / sample.adapter, autocast_adapter_dtype=False, low_cpu_mem_usage=True
        )
        for parameter in adapter.parameters():  # not buffers: the model's frequencies are float32 whatever its dtype is
            parameter.data = parameter.data.to(model.dtype)
        adapter.eval()
        adapted = _score(adapter, sample)
        with adapter.disable_adapter():
            yield adapted, _score(adapter, sample)
        model = adapter.unload()


def load_model(folder: Path) -> Any:
    """Load the model in bfloat16, as it is stored. On a GPU the files go straight to it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    for path in sorted(folder.glob("*.safetensors")):
        unexpected = model.load_state_dict(load_file(path, device=str(device)), strict=False, assign=True)
        assert not unexpected.unexpected_keys, unexpected.unexpected_keys
    model.tie_weights()
    return model.eval()


def _score(model: Any, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([sample.prompt + sample.answer[:-1]], device=next(model.parameters()).device)
    logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=len(sample.answer)).logits[0].float().cpu()
    return logits


def _find_gaps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.max(dim=1).values - logits.gather(1, tokens[:, None])[:, 0]
