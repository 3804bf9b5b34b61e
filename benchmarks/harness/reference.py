"""Compare generated tokens with transformers and PEFT.

The reference scores prompt and completion in float32. A token's gap is the difference between the best score and its
score. Rounding to bfloat16 changes scores, so the tolerance is twice the largest gap of the tokens that transformers
chooses in bfloat16. A comparison with a reference without the adapter shows that the check can fail.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from harness.report import Record

MAX_RATIO = 2.0  # to transformers' largest gap in bfloat16
MIN_TOLERANCE = 1e-3


class Sample(NamedTuple):
    """A completion and its adapter."""

    adapter: str | None
    prompt: list[int]
    completion: list[int]


class Agreement(NamedTuple):
    """The result of a comparison."""

    num_tokens: int
    num_equal: int  # tokens with the best score
    num_near: int  # tokens within the tolerance
    mean_gap: float
    largest_gap: float
    tolerance: float
    peer_equal: int  # tokens of transformers in bfloat16 with the best score
    peer_mean_gap: float
    num_adapted: int  # tokens with an adapter
    num_near_base: int  # of these, tokens that would pass without the adapter

    def make_records(self, name: str) -> list[Record]:
        tokens, peer, own_error = self.num_tokens, "transformers and PEFT in float32", max(self.peer_mean_gap, 1e-6)
        print(
            f"{name}: {self.num_equal} of {tokens} tokens have the best score (transformers in bfloat16: "
            f"{self.peer_equal}), {self.num_near} are within {self.tolerance:.3f}; largest gap {self.largest_gap:.3f}; "
            f"without adapters {self.num_near_base} of {self.num_adapted} would pass",
            flush=True,
        )
        own = f"{own_error:.4f} of transformers in bfloat16"
        return [
            Record(f"{name}, tokens within rounding of the best", self.num_near / tokens, "share", peer, 1.0),
            Record(f"{name}, tokens that are the best", self.num_equal / tokens, "share", peer),
            Record(f"{name}, mean gap", self.mean_gap / own_error, "x", own, 1.5, at_most=True),
        ]


@torch.inference_mode()
def compare(folder: Path, samples: Sequence[Sample], model: Any = None) -> Agreement:
    """Compare completions with the model in the folder. A loaded `model` is converted to float32."""
    model = load_model(folder / "model") if model is None else model
    chosen = [adapted.argmax(dim=1) for adapted, _ in _score_all(model, folder, samples)]
    ours, peers, base = [], [], []
    scores = _score_all(model.float(), folder, samples)
    for sample, best, (adapted, plain) in zip(samples, chosen, scores, strict=True):
        completion = torch.tensor(sample.completion)
        ours.append(_find_gaps(adapted, completion))
        peers.append(_find_gaps(adapted, best))
        base += [_find_gaps(plain, completion)] if sample.adapter is not None else []
    return _summarize(torch.cat(ours), torch.cat(peers), torch.cat([torch.empty(0), *base]))


def _summarize(ours: torch.Tensor, peers: torch.Tensor, base: torch.Tensor) -> Agreement:
    """Summarize the gaps of our tokens, of transformers' bfloat16 tokens, and of our tokens without the adapter."""
    tolerance = max(MAX_RATIO * float(peers.max()), MIN_TOLERANCE)
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
    """Yield the scores of each completion with and without the adapter."""
    for sample in samples:
        if sample.adapter is None:
            plain = _score(model, sample)
            yield plain, plain
            continue
        adapter: Any = PeftModel.from_pretrained(
            model, folder / "adapters" / sample.adapter, autocast_adapter_dtype=False, low_cpu_mem_usage=True
        )
        for parameter in adapter.parameters():  # not buffers: RoPE frequencies stay float32
            parameter.data = parameter.data.to(model.dtype)
        adapter.eval()
        adapted = _score(adapter, sample)
        with adapter.disable_adapter():
            yield adapted, _score(adapter, sample)
        model = adapter.unload()


def load_model(folder: Path) -> Any:
    """Load the model in bfloat16, directly to the GPU if available."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    for path in sorted(folder.glob("*.safetensors")):
        unexpected = model.load_state_dict(load_file(path, device=str(device)), strict=False, assign=True)
        assert not unexpected.unexpected_keys, unexpected.unexpected_keys
    model.tie_weights()
    return model.eval()


def _score(model: Any, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([sample.prompt + sample.completion[:-1]], device=next(model.parameters()).device)
    logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=len(sample.completion)).logits[0].float().cpu()
    return logits


def _find_gaps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.max(dim=1).values - logits.gather(1, tokens[:, None])[:, 0]
