"""Several adapters as one.

`linear` is exact: the sum of the adapters' deltas, as one adapter whose rank is the sum of theirs (PEFT's `cat`). The
others thin out and combine A and B each on their own, so that no large matrix is built or decomposed while a request
waits; their numbers are those of PEFT's `add_weighted_adapter` under the same names.
"""

import hashlib
import math
from collections.abc import Sequence

import torch

from lorax_server.adapters.weights import AdapterWeights, ModuleWeights
from lorax_server.errors import InputError
from lorax_server.types import Merge

__all__ = ["Merge", "MergedAdapter", "combine", "module_seed"]


class MergedAdapter:
    """What a merge makes of adapters; nothing is computed before a module is loaded."""

    def __init__(self, adapters: Sequence[AdapterWeights], merge: Merge) -> None:
        if len(adapters) != len(merge.weights):
            raise InputError(f"{len(adapters)} adapters to merge, but {len(merge.weights)} weights")
        for adapter in adapters:
            extra = adapter.find_extra()
            if extra is not None:
                raise InputError(f"adapter {adapter.name!r} cannot be merged: it has more than factors, {extra}")
        sizes = {adapter.vocab_size for adapter in adapters}
        if len(sizes) != 1:
            raise InputError(f"adapters with different vocabularies, of {sorted(sizes)} tokens, cannot be merged")
        self.name = ",".join(adapter.name for adapter in adapters)
        self.vocab_size = sizes.pop()
        self._adapters = adapters
        self._merge = merge

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(module for adapter in self._adapters for module in adapter.modules))

    def find_extra(self) -> str | None:
        return None

    def load(self, module: str) -> ModuleWeights:
        found = [
            (adapter.load(module), weight)
            for adapter, weight in zip(self._adapters, self._merge.weights, strict=True)
            if module in adapter.modules
        ]
        replaced = self._common_weight(module, [part for part, _ in found])
        lora_as = [part.lora_a for part, _ in found if part.lora_a is not None]
        lora_bs = [part.lora_b for part, _ in found if part.lora_b is not None]
        scales = [part.scale * weight for part, weight in found if part.lora_a is not None]
        if not lora_as:
            return ModuleWeights(weight=replaced)
        if self._merge.strategy == "linear" or len(self._adapters) == 1:
            lora_a = torch.cat([part * scale for part, scale in zip(lora_as, scales, strict=True)])
            return ModuleWeights(lora_a, torch.cat(lora_bs, dim=1), 1.0, weight=replaced)
        self._check_ranks(module, [len(part) for part in lora_as])
        # Each factor gets the root of a weight, and one of them its sign, so that their product has the weight.
        roots = [math.sqrt(abs(scale)) for scale in scales]
        signed = [math.copysign(root, scale) for root, scale in zip(roots, scales, strict=True)]
        generator = torch.Generator().manual_seed(module_seed(self._merge.seed, module))
        return ModuleWeights(
            combine(lora_as, signed, self._merge, generator),
            combine(lora_bs, roots, self._merge, generator),
            1.0,
            weight=replaced,
        )

    def _check_ranks(self, module: str, ranks: list[int]) -> None:
        if len(set(ranks)) != 1:
            raise InputError(
                f"adapters {self.name!r} have ranks {ranks} at {module!r}; {self._merge.strategy} needs equal ranks, "
                "linear does not"
            )

    def _common_weight(self, module: str, parts: Sequence[ModuleWeights]) -> torch.Tensor | None:
        """PEFT writes the base model's own matrix beside factors of an embedding or head."""
        weights = [part.weight for part in parts if part.weight is not None]
        if any(not torch.equal(weight, weights[0]) for weight in weights):
            raise InputError(f"adapters {self.name!r} cannot be merged: each replaces {module!r} in its own way")
        return weights[0] if weights else None


def module_seed(seed: int, module: str) -> int:
    """Every module has a seed of its own, so that ranks and repetitions agree in whatever order they load."""
    return int.from_bytes(hashlib.sha256(f"{seed} {module}".encode()).digest()[:8], "little") >> 1


def combine(
    tensors: Sequence[torch.Tensor], weights: Sequence[float], merge: Merge, generator: torch.Generator
) -> torch.Tensor:
    """One tensor from several of equal shape."""
    if merge.strategy.startswith("dare"):
        kept = torch.stack([_drop_random(tensor, merge.density, generator) for tensor in tensors])
    else:
        kept = torch.stack([_drop_smallest(tensor, merge.density) for tensor in tensors])
    weighted = kept * torch.tensor(weights).view(-1, *[1] * tensors[0].dim())
    if merge.strategy == "dare_linear":
        return weighted.sum(0)
    # Where signs disagree, only the tensors on the side of the majority count, and their mean is taken.
    signs = kept.sign()
    total = (kept if merge.majority_sign_method == "total" else signs).sum(0)
    agrees = signs == torch.where(total >= 0, 1, -1)
    return (weighted * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def _drop_smallest(tensor: torch.Tensor, density: float) -> torch.Tensor:
    if density >= 1:
        return tensor
    mask = torch.zeros(tensor.numel())
    mask[tensor.abs().flatten().topk(int(density * tensor.numel())).indices] = 1
    return tensor * mask.view(tensor.shape)


def _drop_random(tensor: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    """What is left is scaled up, so that the sum stays what it was on average."""
    if density >= 1:
        return tensor
    return tensor * torch.bernoulli(torch.full_like(tensor, density), generator=generator) / density
