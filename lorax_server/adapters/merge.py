"""Merges adapters with the strategies of PEFT's `add_weighted_adapter`.

`linear` is exact: it concatenates the factors (PEFT calls this `cat`), so the rank is the sum of the adapters' ranks.
The other strategies prune and combine A and B separately, which avoids building or decomposing a full matrix during a
request.
"""

import hashlib
import math
from collections.abc import Sequence

import torch

from lorax_server.adapters.weights import ModuleWeights, StoredAdapter
from lorax_server.errors import InputError
from lorax_server.types import Merge


class MergedAdapter:
    """A merge of several adapters. It is computed lazily: `load` combines the tensors of one module."""

    def __init__(self, adapters: Sequence[StoredAdapter], merge: Merge) -> None:
        for adapter in adapters:
            extra = adapter.find_merge_obstacle()
            if extra is not None:
                raise InputError(
                    f"adapter {adapter.name!r} cannot be merged: it contains more than LoRA factors ({extra})"
                )
        sizes = {adapter.vocab_size for adapter in adapters}
        if len(sizes) != 1:
            raise InputError(f"adapters with different vocabulary sizes {sorted(sizes)} cannot be merged")
        self.name = ",".join(adapter.name for adapter in adapters)
        self.vocab_size = sizes.pop()
        self._adapters = adapters
        self._merge = merge

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(module for adapter in self._adapters for module in adapter.modules))

    def find_rank(self, module: str) -> int:
        ranks = [adapter.find_rank(module) for adapter in self._adapters if module in adapter.modules]
        return sum(ranks) if self._is_concatenated else max(ranks)

    @property
    def _is_concatenated(self) -> bool:
        """Return True if this merge concatenates the LoRA factors instead of adding them."""
        return self._merge.strategy == "linear" or len(self._adapters) == 1

    def load(self, module: str) -> ModuleWeights:
        loaded = [
            (adapter.load(module), weight)
            for adapter, weight in zip(self._adapters, self._merge.weights, strict=True)
            if module in adapter.modules
        ]
        replaced = self._find_common_weight(module, [weights for weights, _ in loaded])
        lora_as = [weights.lora_a.float() for weights, _ in loaded if weights.lora_a is not None]
        lora_bs = [weights.lora_b.float() for weights, _ in loaded if weights.lora_b is not None]
        scales = [weights.scale * weight for weights, weight in loaded if weights.lora_a is not None]
        if not lora_as:
            return ModuleWeights(weight=replaced)
        if self._is_concatenated:
            lora_a = torch.cat([lora_a * scale for lora_a, scale in zip(lora_as, scales, strict=True)])
            return ModuleWeights(lora_a, torch.cat(lora_bs, dim=1), 1.0, weight=replaced)
        ranks = [len(lora_a) for lora_a in lora_as]
        if len(set(ranks)) != 1:
            raise InputError(
                f"adapters {self.name!r} have ranks {ranks} at {module!r}; {self._merge.strategy} requires equal "
                "ranks, linear does not"
            )
        # Multiply both factors by sqrt(abs(weight)) and A by the weight's sign, so B @ A is scaled by the weight.
        roots = [math.sqrt(abs(scale)) for scale in scales]
        signed = [math.copysign(root, scale) for root, scale in zip(roots, scales, strict=True)]
        generator = torch.Generator().manual_seed(module_seed(self._merge.seed, module))
        lora_a = merge_tensors(lora_as, signed, self._merge, generator)
        lora_b = merge_tensors(lora_bs, roots, self._merge, generator)
        return ModuleWeights(lora_a, lora_b, 1.0, weight=replaced)

    def _find_common_weight(self, module: str, loaded: Sequence[ModuleWeights]) -> torch.Tensor | None:
        """Return the base model matrix that PEFT saves together with embedding or head factors, or None."""
        matrices = [weights.weight for weights in loaded if weights.weight is not None]
        if any(not torch.equal(matrix, matrices[0]) for matrix in matrices):
            raise InputError(f"adapters {self.name!r} cannot be merged: they replace {module!r} by different weights")
        return matrices[0] if matrices else None


def module_seed(seed: int, module: str) -> int:
    """Return a seed that depends only on the request seed and the module name, not on rank or load order."""
    return int.from_bytes(hashlib.sha256(f"{seed} {module}".encode()).digest()[:8], "little") >> 1


def merge_tensors(
    tensors: Sequence[torch.Tensor], weights: Sequence[float], merge: Merge, generator: torch.Generator
) -> torch.Tensor:
    """Prune each tensor, and return their weighted combination. The tensors must have equal shapes."""
    if merge.strategy.startswith("dare"):
        pruned = torch.stack([_drop_random(tensor, merge.density, generator) for tensor in tensors])
    else:
        pruned = torch.stack([_drop_smallest(tensor, merge.density) for tensor in tensors])
    weighted = pruned * torch.tensor(weights).view(-1, *[1] * tensors[0].dim())
    if merge.strategy == "dare_linear":
        return weighted.sum(0)
    # Per element, average the tensors that have the majority sign.
    signs = pruned.sign()
    total = (pruned if merge.majority_sign_method == "total" else signs).sum(0)
    agrees = signs == torch.where(total >= 0, 1, -1)
    return (weighted * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def _drop_smallest(tensor: torch.Tensor, density: float) -> torch.Tensor:
    if density >= 1:
        return tensor
    mask = torch.zeros(tensor.numel())
    mask[tensor.abs().flatten().topk(int(density * tensor.numel())).indices] = 1
    return tensor * mask.view(tensor.shape)


def _drop_random(tensor: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    """Return the tensor with random elements set to zero, and the remaining elements rescaled to preserve the mean."""
    if density >= 1:
        return tensor
    return tensor * torch.bernoulli(torch.full_like(tensor, density), generator=generator) / density
