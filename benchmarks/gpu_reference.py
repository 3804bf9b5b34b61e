"""Comparison of answers with transformers and PEFT, token by token.

The reference reads a prompt and our answer at once, in the model's own precision, and gives scores for every token of
the answer. Two ways of rounding need not agree on the best of 128,256 scores, of which several may even be equal. So a
token is right if its score there is near the best one: at most `SPACINGS` times the distance of two neighbouring
numbers of that size, 0.25 for scores from 4 to 8 in bfloat16. The comparison is made without the adapter too, to show
that it can fail.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SPACINGS = 8


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
    largest_gap: float
    tolerance: float  # the smallest that was applied
    num_adapted: int  # tokens of adapters
    num_near_base: int  # tokens of these that would pass if the reference had no adapter


class _Gaps(NamedTuple):
    """By how much each token's score is below the best, and by how much it may be."""

    gaps: torch.Tensor
    allowed: torch.Tensor

    @property
    def num_near(self) -> int:
        return int((self.gaps <= self.allowed).sum())


@torch.inference_mode()
def compare(folder: Path, samples: Sequence[Sample]) -> Agreement:
    model: Any = _load(folder / "model")
    plain, adapted, base = [], [], []
    for sample in samples:
        if sample.adapter is None:
            plain.append(_find_gaps(model, sample))
            continue
        adapter = PeftModel.from_pretrained(
            model, folder / "adapters" / sample.adapter, autocast_adapter_dtype=False, low_cpu_mem_usage=True
        ).eval()
        adapted.append(_find_gaps(adapter, sample))
        with adapter.disable_adapter():
            base.append(_find_gaps(adapter, sample))
        model = adapter.unload()
    all_gaps = [*plain, *adapted]
    return Agreement(
        num_tokens=sum(len(found.gaps) for found in all_gaps),
        num_equal=sum(int((found.gaps <= 0).sum()) for found in all_gaps),
        num_near=sum(found.num_near for found in all_gaps),
        largest_gap=max(float(found.gaps.max()) for found in all_gaps),
        tolerance=min(float(found.allowed.min()) for found in all_gaps),
        num_adapted=sum(len(found.gaps) for found in adapted),
        num_near_base=sum(found.num_near for found in base),
    )


def _load(folder: Path) -> Any:
    """Load the model. On a GPU the files go straight to it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path, device=str(device)).items()}
        unexpected = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
        assert not unexpected, unexpected
    return model.eval()


def _find_gaps(model: Any, sample: Sample) -> _Gaps:
    device, count = next(model.parameters()).device, len(sample.answer)
    ids = torch.tensor([sample.prompt + sample.answer[:-1]], device=device)
    logits = model(ids, use_cache=False, logits_to_keep=count).logits[0]
    best = logits.max(dim=1).values.float()
    chosen = logits.gather(1, torch.tensor(sample.answer, device=device)[:, None])[:, 0].float()
    exponents = torch.tensor([math.floor(math.log2(max(abs(value), 2**-10))) for value in best.tolist()])
    return _Gaps((best - chosen).cpu(), SPACINGS * torch.finfo(logits.dtype).eps * 2.0**exponents)
