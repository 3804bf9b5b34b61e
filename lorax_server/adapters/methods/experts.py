"""Reads LoRA factors for mixtures of experts in the two forms that PEFT writes.

Adapters trained with transformers 4 have one module per expert and matrix, `experts.7.gate_proj`. Adapters with
`target_parameters` have one pair of factors for all experts in a layer: A is `[experts * rank, in]`, expert by expert,
and B is `[out, rank * experts]`, rank by rank. If both parameters of a module are targeted, PEFT wraps the module
twice, and the tensors of the first parameter have the name `experts.base_layer`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import regex
import torch

from lorax_server.adapters.checkpoint import TensorInfo, TensorRole, find_module
from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.target import AdapterTarget, ExpertTarget
from lorax_server.errors import AdapterError

EXPERT_KEY_PATTERN = regex.compile(
    r"(?P<module>.+\.experts)(?:\.(?P<expert>\d+)\.(?P<matrix>\w+)|(?P<nested>(?:\.base_layer)*))"
    r"\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight"
)
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")  # in the order in which PEFT wraps them

ReadTensor = Callable[[TensorRole, str], torch.Tensor]


class FactorLocation(NamedTuple):
    """The location of a target's factors in the file."""

    keys: Mapping[str, list[str]]  # "A" and "B" -> one tensor per expert, or one tensor for all experts
    rank: int
    scale: float


class ExpertFactors:
    """The LoRA factors for experts in an adapter. The constructor raises AdapterError if a tensor is not supported."""

    def __init__(
        self, config: AdapterConfig, tensors: Mapping[str, TensorInfo], targets: Iterable[AdapterTarget]
    ) -> None:
        self._config, self._tensors = config, tensors
        self._targets = {target.name: target for target in targets}
        self._modules: dict[str, list[tuple[AdapterTarget, ExpertTarget]]] = {}
        for target in self._targets.values():
            assert target.experts is not None
            self._modules.setdefault(target.experts.module, []).append((target, target.experts))
        self.keys: set[str] = set()  # the tensors that belong to experts
        self.by_target: dict[str, FactorLocation] = {}
        found = self._find_keys() if self._modules else {}
        if found and config.use_dora:
            raise self._error("config field use_dora = True is not supported for experts")
        for module, members in self._modules.items():
            name, single, fused = found.get(module, (module, {}, {}))
            self._assign_per_expert_tensors(name, members, single)
            self._assign_fused_tensors(name, members, fused)

    def load(self, target_name: str, read: ReadTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a target's factors A `[experts, rank, in]` and B `[experts, out, rank]`."""
        target, factors = self._targets[target_name], self.by_target[target_name]
        experts = target.experts
        assert experts is not None
        a, b = (
            [read(role, key) for key in factors.keys[role.value[-1]]] for role in (TensorRole.LORA_A, TensorRole.LORA_B)
        )
        if len(a) > 1 or experts.num_experts == 1:
            return torch.stack(a), torch.stack(b)
        rows = b[0][experts.outputs]
        return (
            a[0].view(experts.num_experts, factors.rank, target.inputs.full),
            rows.reshape(target.outputs.full, factors.rank, experts.num_experts).permute(2, 0, 1),
        )

    def find_shared_a_target(self, target_name: str) -> str | None:
        """Return the earlier target whose A this target shares, because PEFT stores both in one parameter."""
        keys = self.by_target[target_name].keys["A"]
        first = next(name for name, factors in self.by_target.items() if factors.keys["A"] == keys)
        return None if first == target_name else first

    def _error(self, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self._config.name!r}: {reason}")

    def _find_keys(self) -> dict[str, tuple[str, dict[tuple[str, int], dict[str, str]], dict[int, dict[str, str]]]]:
        """Return, for each module, its name in the file, the tensors for single experts, and the tensors for all
        experts.

        Tensors for single experts are keyed by matrix and expert, and tensors for all experts by nesting depth. The
        inner keys are the factors.
        """
        found: dict[str, tuple[str, dict[tuple[str, int], dict[str, str]], dict[int, dict[str, str]]]] = {}
        modules = set(self._modules)
        for key in self._tensors:
            match = EXPERT_KEY_PATTERN.fullmatch(key) if ".experts." in key else None
            module = None if match is None else find_module(match["module"], modules)
            if match is None or module is None:
                if ".experts." in key and "lora_magnitude_vector" in key:
                    raise self._error(f"tensor {key!r} is DoRA for experts, which is not supported")
                continue
            name = match["module"].removeprefix("base_model.model.")
            other, single, fused = found.setdefault(module, (name, {}, {}))
            if match["expert"] is not None:
                group = single.setdefault((match["matrix"], int(match["expert"])), {})
            else:
                group = fused.setdefault(match["nested"].count("."), {})
            if other != name or group.setdefault(match["factor"], key) != key:
                raise self._error(f"tensor {key!r} is a duplicate")
            self.keys.add(key)
        return found

    def _assign_per_expert_tensors(
        self,
        name: str,
        members: list[tuple[AdapterTarget, ExpertTarget]],
        tensors: dict[tuple[str, int], dict[str, str]],
    ) -> None:
        """Assign an adapter's tensors if it has one module per expert and matrix."""
        for target, experts in members:
            if not any(matrix == experts.matrix for matrix, _ in tensors):
                continue
            groups = [tensors.pop((experts.matrix, expert), {}) for expert in range(experts.num_experts)]
            names = [f"{name}.{expert}.{experts.matrix}" for expert in range(experts.num_experts)]
            settings = {(self._config.rank(one), self._config.scale(one)) for one in names}
            if any(len(group) != 2 for group in groups) or len(settings) != 1:
                raise self._error(
                    f"module {name + '.*.' + experts.matrix!r} must have LoRA factors for all {experts.num_experts} "
                    "experts, with the same rank and scale"
                )
            if any(self._config.is_target(one) is False for one in names):
                raise self._error(f"the file has tensors for {names[0]!r}, which target_modules in the config exclude")
            ((rank, scale),) = settings
            for group in groups:
                self._check_shape(group["A"], (rank, target.inputs.full))
                self._check_shape(group["B"], (target.outputs.full, rank))
            keys = {factor: [group[factor] for group in groups] for factor in "AB"}
            self.by_target[target.name] = FactorLocation(keys, rank, scale)
        for (matrix, expert), group in tensors.items():
            raise self._error(
                f"tensor {next(iter(group.values()))!r} targets expert {expert} and matrix {matrix!r}, which the base "
                "model does not have"
            )

    def _assign_fused_tensors(
        self, name: str, members: list[tuple[AdapterTarget, ExpertTarget]], tensors: dict[int, dict[str, str]]
    ) -> None:
        """Assign an adapter's tensors if it has `target_parameters`."""
        targeted = [one for one in EXPERT_PARAMETERS if self._config.is_target_parameter(f"{name}.{one}")]
        if set(tensors) != set(range(len(targeted))) or any(len(group) != 2 for group in tensors.values()):
            raise self._error(
                f"module {name!r} must have LoRA factors for the parameters that target_parameters in the config "
                f"name, {targeted} (got {len(tensors)} pairs)"
            )
        for depth, parameter in enumerate(reversed(targeted)):
            group, full_name = tensors[depth], f"{name}.{parameter}"
            rank = self._config.rank(full_name)
            parts = [(target, experts) for target, experts in members if experts.parameter == parameter]
            outputs = sum(target.outputs.full for target, _ in parts)
            target, experts = parts[0]
            self._check_shape(group["A"], (experts.num_experts * rank, target.inputs.full))
            self._check_shape(group["B"], (outputs, rank * experts.num_experts))
            for target, _ in parts:
                if target.name in self.by_target:
                    raise self._error(f"module {name!r} has factors for single experts and for all experts")
                keys = {factor: [group[factor]] for factor in "AB"}
                self.by_target[target.name] = FactorLocation(keys, rank, self._config.scale(full_name))

    def _check_shape(self, key: str, expected: tuple[int, ...]) -> None:
        shape = self._tensors[key].shape
        if shape != expected:
            raise self._error(f"tensor {key!r} has shape {shape}, expected {expected} for this base model and config")
