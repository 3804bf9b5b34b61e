"""Loads adapter tensors module by module, and validates them against the base model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from lorax_server.adapters.checkpoint import TensorRole, read_header
from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.identity import compute_identity
from lorax_server.adapters.methods.contents import FACTOR_ROLES, AdapterContents
from lorax_server.adapters.methods.fields import Method
from lorax_server.adapters.methods.matrices import draw_vera_projections
from lorax_server.adapters.target import AdapterTarget
from lorax_server.adapters.tensor_reader import MemoryReader, TensorReader, describe_tensors
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.names import WEIGHTS_FILE
from lorax_server.files.regular_file import FileChangedError, Stamp, convert_read_errors, read_stamp

# LoRA factors, and the unchanged base weight that PEFT saves with embedding or head factors.
MERGEABLE_ROLES = (*FACTOR_ROLES, TensorRole.WEIGHT)


@dataclass(frozen=True)
class ModuleWeights:
    """The adapter tensors for one module. They are unsharded, in CPU memory, and finite.

    The factors keep the file's dtype to save memory. All other tensors are float32.
    """

    lora_a: torch.Tensor | None = None  # [rank, in]; for experts [experts, rank, in]
    lora_b: torch.Tensor | None = None  # [out, rank]; for experts [experts, out, rank]
    scale: float = 0.0
    magnitude: torch.Tensor | None = None  # [out], DoRA
    diagonal: torch.Tensor | None = None  # [rank], KaSA
    output_scale: torch.Tensor | None = None  # [out], (IA)³: multiplies the module output, including the bias
    lora_bias: torch.Tensor | None = None  # [out], multiplied by `scale`
    bias: torch.Tensor | None = None  # [out], replaces the base model bias
    weight: torch.Tensor | None = None  # replaces the base model weight
    token_ids: tuple[int, ...] = ()
    token_rows: torch.Tensor | None = None  # [token ids, size], replaces the rows of `token_ids`
    shared_a: str | None = None  # an earlier module with the same `lora_a`


class AdapterWeights(Protocol):
    """The weights of one adapter, or of a merge of several adapters."""

    name: str
    vocab_size: int

    @property
    def modules(self) -> list[str]: ...

    def find_rank(self, module: str) -> int:
        """Return the LoRA rank at a module, or 0 if the module has no LoRA factors. This does not read the file."""
        ...

    def load(self, module: str) -> ModuleWeights: ...


class StoredAdapter:
    """An adapter in a local folder, or in memory if `tensors` is set.

    The constructor checks tensor names and shapes; `load` reads a module's tensors.
    """

    def __init__(
        self,
        folder: Path,
        config: AdapterConfig,
        targets: Mapping[str, AdapterTarget],
        stamp: Stamp | None = None,  # the stamp that the weights file must have
        tensors: Mapping[str, torch.Tensor] | None = None,  # instead of the weights file
    ) -> None:
        self.name = config.name
        self.config = config
        self.path = folder / WEIGHTS_FILE
        self._stamp: Stamp | None = None  # None for an adapter in memory
        self._reader: TensorReader | MemoryReader
        if tensors is None:
            with convert_read_errors(f"adapter {self.name!r}", self.path), self._detect_removal():
                self._stamp = read_stamp(self.path)
            if stamp is not None and stamp != self._stamp:
                raise SourceError(f"adapter {self.name!r}: {self.path.name} changed after it was resolved; try again")
            self.tensors = read_header(self.path, self.name)
            self._reader = TensorReader(self.path, self._stamp, self.tensors)
        else:
            self.tensors = describe_tensors(tensors, self.name)
            self._reader = MemoryReader(tensors)
        self._contents = AdapterContents(config, self.tensors, targets)
        self._targets = targets
        self.vocab_size = self._contents.vocab_size

    @property
    def modules(self) -> list[str]:
        return [*self._contents.keys, *self._contents.experts.by_target]

    def compute_identity(self) -> str:
        with self._detect_file_changes():
            return compute_identity(self.config, self.path, self.tensors)

    def find_merge_obstacle(self) -> str | None:
        """Return a description of the setting or tensor that prevents merging, or None if the adapter can be merged."""
        if self.config.method is not Method.LORA:
            return f"peft_type = {self.config.method.value}"
        if self.config.invocation_tokens:
            return "alora_invocation_tokens"
        if self._contents.experts.by_target:
            return "LoRA factors for experts"
        if self.config.modules_to_save:
            return f"modules_to_save = {list(self.config.modules_to_save)}"
        tensors = (item for keys in self._contents.keys.values() for item in keys.items())
        return next((f"such as {key!r}" for role, key in tensors if role not in MERGEABLE_ROLES), None)

    def find_rank(self, module: str) -> int:
        return self._contents.find_rank(module)

    def find_plain_factors(self) -> dict[str, tuple[str, str]] | None:
        """Return the tensor names of LoRA A and LoRA B by module, or None if the adapter has other weights."""
        contents = self._contents
        if self.config.method is not Method.LORA or contents.experts.by_target or contents.input_scales:
            return None
        if any(keys.keys() != set(FACTOR_ROLES) for keys in contents.keys.values()):
            return None
        if any(contents.count_blocks(module) != (1, 1) for module in contents.keys):
            return None
        return {module: (keys[FACTOR_ROLES[0]], keys[FACTOR_ROLES[1]]) for module, keys in contents.keys.items()}

    def find_scale(self, module: str) -> float:
        """Return the scale of a module with LoRA factors."""
        return self._contents.scales[module]

    def load(self, module: str) -> ModuleWeights:
        contents, experts = self._contents, self._contents.experts
        if module in experts.by_target:
            with self._detect_file_changes():
                lora_a, lora_b = experts.load(module, self._read)
            return ModuleWeights(
                lora_a, lora_b, experts.by_target[module].scale, shared_a=experts.find_shared_a_target(module)
            )
        keys = contents.keys[module]
        with self._detect_file_changes():
            tensors: dict[str, Any] = {role.field: self._read(role, key) for role, key in keys.items()}
            scale = self._expand_factors(module, tensors)
            output_scale = self._compute_ia3_output_scale(module, tensors.pop("ia3", None))
        if "weight" in tensors:
            tensors["weight"] = self._targets[module].to_linear_layout(tensors["weight"])
        token_ids = contents.token_ids.get(module, ()) if TensorRole.TOKEN_ROWS in keys else ()
        return ModuleWeights(scale=scale, output_scale=output_scale, token_ids=token_ids, **tensors)

    def _expand_factors(self, module: str, tensors: dict[str, torch.Tensor]) -> float:
        """Expand VeRA and BD-LoRA tensors to plain LoRA factors in place, and return the scale."""
        if "vera_b" in tensors:
            lora_a, lora_b = self._projections
            by_output, by_rank = tensors.pop("vera_b")[:, None], tensors.pop("vera_d")[:, None]
            tensors["lora_a"] = lora_a[:, : self._targets[module].inputs.full] * by_rank
            tensors["lora_b"] = lora_b[: len(by_output)] * by_output
            return 1.0
        if "lora_a" not in tensors:
            return 0.0
        a_blocks, b_blocks = self._contents.count_blocks(module)
        if a_blocks * b_blocks > 1:  # BD-LoRA stores only the diagonal blocks
            tensors["lora_a"] = torch.block_diag(*tensors["lora_a"].chunk(a_blocks))
            tensors["lora_b"] = torch.block_diag(*tensors["lora_b"].chunk(b_blocks))
        return self._contents.scales[module]

    def _compute_ia3_output_scale(self, module: str, vector: torch.Tensor | None) -> torch.Tensor | None:
        """Return the module's (IA)³ output scale, including the input scale of the module that follows it, or None if
        there is no scale.
        """
        scale = None if vector is None or self._contents.scales_inputs(module) else vector.flatten()
        if module not in self._contents.input_scales:
            return scale
        reader, first = self._contents.input_scales[module]
        inputs = self._read(TensorRole.IA3, self._contents.keys[reader][TensorRole.IA3]).flatten()
        scale = torch.ones(self._targets[module].outputs.full) if scale is None else scale.clone()
        scale[first : first + len(inputs)] *= inputs
        return scale

    @cached_property
    def _projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return VeRA's shared matrices A and B. They are read from the file, or generated from the seed as in PEFT."""
        (rank, inputs), (outputs, _) = self._contents.projection_shapes().values()
        if self.config.projection_seed is not None:
            return draw_vera_projections(self.config.projection_seed, rank, inputs, outputs)
        a, b = (self._read(TensorRole.VERA_B, self._contents.projections[matrix]) for matrix in "AB")
        return a, b

    @contextmanager
    def _detect_file_changes(self) -> Iterator[None]:
        """Raise SourceError if the file changes while the context is active, because the tensors must match the
        identity.
        """
        if self._stamp is None:
            yield
            return
        with convert_read_errors(f"adapter {self.name!r}", self.path), self._detect_removal():
            yield
            if read_stamp(self.path) != self._stamp:
                raise FileChangedError(0, "it changed while it was read")

    @contextmanager
    def _detect_removal(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:  # evicted from the disk cache; the next request downloads it again
            raise SourceError(
                f"adapter {self.name!r}: {self.path.name} was removed from this machine; try again"
            ) from error

    def _read(self, role: TensorRole, key: str) -> torch.Tensor:
        tensor, is_finite = self._reader.read(key)
        if not is_finite:
            raise AdapterError(f"adapter {self.name!r}: tensor {key!r} has non-finite values")
        return tensor if role in FACTOR_ROLES else tensor.float()
