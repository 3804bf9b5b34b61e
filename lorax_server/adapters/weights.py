"""An adapter's tensors, checked against the base model, one module at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from lorax_server.adapters.checkpoint import RENAMED_MODULES, TensorRole, assign_tensors, read_header
from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.identity import identify
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.adapters.tensor_reader import TensorReader
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.names import WEIGHTS_FILE
from lorax_server.files.plain_file import ChangedError, Stamp, reading, stamp_of

# Factors, and the weight that PEFT writes beside factors of an embedding or head, which is the base model's.
MERGEABLE_ROLES = (TensorRole.LORA_A, TensorRole.LORA_B, TensorRole.WEIGHT)
FACTORS = (TensorRole.LORA_A, TensorRole.LORA_B)


@dataclass(frozen=True)
class ModuleWeights:
    """The tensors of an adapter at one module: whole, on the CPU, finite. All are in float32 but the factors, which are
    most of an adapter and may be in half precision, as in the file."""

    lora_a: torch.Tensor | None = None  # [rank, in]
    lora_b: torch.Tensor | None = None  # [out, rank]
    scale: float = 0.0
    magnitude: torch.Tensor | None = None  # [out] of DoRA
    lora_bias: torch.Tensor | None = None  # [out] scaled as the factors are
    bias: torch.Tensor | None = None  # [out] in place of the base model's
    weight: torch.Tensor | None = None  # in place of the base model's
    token_ids: tuple[int, ...] = ()
    token_rows: torch.Tensor | None = None  # [token ids, size] in place of those rows


class AdapterWeights(Protocol):
    """The tensors of an adapter, or of a merge of several."""

    name: str
    vocab_size: int

    @property
    def modules(self) -> list[str]: ...

    def load(self, module: str) -> ModuleWeights: ...

    def find_extra(self) -> str | None:
        """Describe a tensor that is not one of a pair of factors, if there is one: such adapters cannot be merged."""
        ...


class StoredAdapter:
    """An adapter in a file. Opening it checks names and shapes; tensors are read when a module is loaded."""

    def __init__(
        self,
        folder: Path,
        config: AdapterConfig,
        targets: Mapping[str, AdapterTarget],
        stamp: Stamp | None = None,  # of the file that was chosen
    ) -> None:
        self.name = config.name
        self.config = config
        self.path = folder / WEIGHTS_FILE
        with self._reading():
            self._stamp = stamp_of(self.path)
        if stamp is not None and stamp != self._stamp:
            raise SourceError(f"adapter {self.name!r}: {self.path.name} changed after it was chosen; try again")
        self.tensors = read_header(self.path, self.name)
        self._reader = TensorReader(self.path, self._stamp, self.tensors)
        self._keys, self._own_names = assign_tensors(self.tensors, targets, self.name)
        self._targets = targets
        by_kind = {target.kind: target for target in targets.values()}
        self._embedding, self._head = by_kind[Kind.EMBEDDING], by_kind[Kind.HEAD]
        self._check_modules()
        # Once for all: patterns take time, of which an adapter has only so much.
        self._ranks = {module: config.rank(own_name) for module, own_name in self._own_names.items()}
        self._scales = {module: config.scale(own_name) for module, own_name in self._own_names.items()}
        self._token_ids = self._find_token_ids()
        self._share_tied_rows()
        self._check_complete()
        self.vocab_size = self._find_vocab_size()
        for module, keys in self._keys.items():
            self._check_roles(targets[module], keys)
            self._check_shapes(targets[module], keys)

    @property
    def modules(self) -> list[str]:
        return list(self._keys)

    def identify(self) -> str:
        with self._reading():
            return identify(self.config, self.path, self.tensors)

    def find_extra(self) -> str | None:
        if self.config.modules_to_save:
            return f"modules_to_save = {list(self.config.modules_to_save)}"
        extra = (key for keys in self._keys.values() for role, key in keys.items() if role not in MERGEABLE_ROLES)
        return next((f"such as {key!r}" for key in extra), None)

    def load(self, module: str) -> ModuleWeights:
        keys = self._keys[module]
        with self._reading():
            tensors = {role.field: self._read(role, key) for role, key in keys.items()}
        a_blocks, b_blocks = self._count_blocks(module)
        if TensorRole.LORA_A in keys and a_blocks * b_blocks > 1:  # BD-LoRA stores only the blocks on the diagonal
            tensors["lora_a"] = torch.block_diag(*tensors["lora_a"].chunk(a_blocks))
            tensors["lora_b"] = torch.block_diag(*tensors["lora_b"].chunk(b_blocks))
        scale = self._scales[module] if TensorRole.LORA_A in keys else 0.0
        token_ids = self._token_ids.get(module, ()) if TensorRole.TOKEN_ROWS in keys else ()
        return ModuleWeights(scale=scale, token_ids=token_ids, **tensors)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Refuse a file that changes: identity and numbers must come from the same bytes."""
        with reading(f"adapter {self.name!r}", self.path):
            try:
                yield
                if stamp_of(self.path) != self._stamp:
                    raise ChangedError(0, "it changed while it was read")
            except FileNotFoundError as error:  # it made room for others; naming the adapter fetches it again
                raise SourceError(
                    f"adapter {self.name!r}: {self.path.name} is not on this machine any more; try again"
                ) from error

    def _read(self, role: TensorRole, key: str) -> torch.Tensor:
        tensor, is_finite = self._reader.read(key)
        if not is_finite:
            raise self._refuse(key, "has numbers that are not finite")
        return tensor if role in FACTORS else tensor.float()

    def _count_blocks(self, module: str) -> tuple[int, int]:
        """Return the numbers of blocks into which A and B fall."""
        blocks, own_name = self.config.block_diagonal, self._own_names.get(module, module)
        if blocks is not None and any(name in own_name for name in blocks.a):
            return blocks.blocks, 1
        if blocks is not None and any(name in own_name for name in blocks.b):
            return 1, blocks.blocks
        return 1, 1

    def _refuse(self, key: str, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self.name!r}: tensor {key!r} {reason}")

    def _check_modules(self) -> None:
        """Refuse a file whose modules are not those that the config targets."""
        for module, target in self._targets.items():
            is_target, keys = self._is_target(target), self._keys.get(module, {})
            has_factors = TensorRole.LORA_A in keys or TensorRole.LORA_B in keys
            if is_target and not has_factors:
                raise AdapterError(
                    f"adapter {self.name!r}: module {module!r} is targeted but has no tensors in the file"
                )
            if is_target is False and has_factors:
                raise AdapterError(
                    f"adapter {self.name!r}: the file has factors for module {module!r}, which the config's "
                    "target_modules, exclude_modules or layers_to_transform leave out"
                )

    def _is_target(self, target: AdapterTarget) -> bool | None:
        if target.kind is Kind.NORM:
            return False
        old_names = [old for old, new in RENAMED_MODULES.items() if new == target.name]
        names = [self._own_names.get(target.name, target.name), target.name, *old_names]
        answers = [self.config.is_target(name) for name in names]
        if True in answers:
            return True
        if None in answers and self.config.target_modules == "all-linear":
            return target.kind is Kind.LINEAR
        if self.config.ensure_weight_tying and target in (self._embedding, self._head):
            return None  # PEFT may adapt it because the other one is
        return answers[0]

    def _share_tied_rows(self) -> None:
        """Replace rows in embedding and head of a tied model alike: one matrix serves as both.

        Not so `modules_to_save`, of which PEFT makes a copy for the one module.
        """
        embedding, head = self._embedding, self._head
        if embedding.weight is not head.weight:
            return
        of_embedding, of_head = self._keys.get(embedding.name, {}), self._keys.get(head.name, {})
        for giver, keys, taker in ((embedding, of_embedding, head), (head, of_head, embedding)):
            if TensorRole.WEIGHT in keys and not self._is_saved(giver.name):
                self._keys.setdefault(taker.name, {}).setdefault(TensorRole.WEIGHT, keys[TensorRole.WEIGHT])
        if TensorRole.TOKEN_ROWS in of_embedding:
            rows = of_embedding[TensorRole.TOKEN_ROWS]
            self._keys.setdefault(head.name, {}).setdefault(TensorRole.TOKEN_ROWS, rows)
            self._token_ids.setdefault(head.name, self._token_ids.get(embedding.name, ()))

    def _is_saved(self, module: str) -> bool:
        return self._own_names.get(module, module).endswith(self.config.modules_to_save)

    def _check_complete(self) -> None:
        """Refuse a file that lacks what the config says was trained: the base model's would be served in its place."""
        for module, target in self._targets.items():
            required = [TensorRole.TOKEN_ROWS] if self._token_ids.get(module) else []
            if self._is_saved(module):
                required += [TensorRole.WEIGHT] * (target.weight is not None)
                required += [TensorRole.BIAS] * (target.bias is not None)
            for role in required:
                if role not in self._keys.get(module, {}):
                    raise AdapterError(
                        f"adapter {self.name!r}: module {module!r} has no {role.value} in the file, though the "
                        "config's modules_to_save or trainable_token_indices ask for it"
                    )

    def _find_vocab_size(self) -> int:
        """Return the base model's, unless the adapter brings a head of another size."""
        base = self._head.outputs.full
        sizes = {target.name: self._vocab_size_at(target.name, base) for target in (self._embedding, self._head)}
        changed = {name: size for name, size in sizes.items() if size is not None}
        grows = max(changed.values(), default=base) > base
        if len(set(changed.values())) > 1 or (grows and len(changed) == 1):
            raise AdapterError(
                f"adapter {self.name!r} changes the vocabulary, but not alike in embedding and head: it has "
                + " and ".join(f"{size or base} rows at {name!r}" for name, size in sizes.items())
            )
        return next(iter(changed.values()), base)

    def _vocab_size_at(self, module: str, base: int) -> int | None:
        """Return the number of tokens of the adapter at an embedding or head; None where it keeps the base model's."""
        keys = self._keys.get(module, {})
        stored = base
        if TensorRole.WEIGHT in keys:
            shape = self.tensors[keys[TensorRole.WEIGHT]].shape
            if len(shape) != 2 or shape[0] == 0:
                raise self._refuse(keys[TensorRole.WEIGHT], f"has shape {shape}, which no embedding or head has")
            stored = shape[0]
        size = stored
        if TensorRole.TOKEN_ROWS in keys:
            token_ids = self._token_ids.get(module, ())
            size = max(stored, 1 + max(token_ids, default=0))
            if len({token_id for token_id in token_ids if token_id >= stored}) != size - stored:
                raise self._refuse(keys[TensorRole.TOKEN_ROWS], f"leaves out some of the tokens {stored} to {size - 1}")
        return None if size == base and TensorRole.WEIGHT not in keys else size

    def _find_token_ids(self) -> dict[str, tuple[int, ...]]:
        """Return the tokens with trained rows by module. Without names the embedding is meant."""
        indices = self.config.token_indices
        if not isinstance(indices, Mapping):
            return {self._embedding.name: indices}
        token_ids: dict[str, tuple[int, ...]] = {}
        modules = [self._embedding.name, self._head.name]
        for name, ids in indices.items():
            fits = [module for module in modules if f".{module}".endswith(f".{name}")]
            if len(fits) != 1 or fits[0] in token_ids:
                raise AdapterError(
                    f"adapter {self.name!r}: trainable_token_indices names {name[:80]!r}, which is not one of "
                    f"{modules[0]!r} and {modules[1]!r}, or is named twice"
                )
            token_ids[fits[0]] = ids
        return token_ids

    def _check_roles(self, target: AdapterTarget, keys: Mapping[TensorRole, str]) -> None:
        """Refuse tensors that do not belong together, or not at this module."""
        if (TensorRole.LORA_A in keys) != (TensorRole.LORA_B in keys):
            present = keys.get(TensorRole.LORA_A) or keys[TensorRole.LORA_B]
            raise self._refuse(present, "has no counterpart: of lora_A and lora_B one is missing")
        for is_asked, role in (
            (self.config.use_dora, TensorRole.MAGNITUDE),
            (self.config.lora_bias, TensorRole.LORA_BIAS),
        ):
            if role in keys and not is_asked:
                raise self._refuse(keys[role], f"is there, though the config does not ask for {role.value}")
            if is_asked and TensorRole.LORA_A in keys and role not in keys:
                raise self._refuse(keys[TensorRole.LORA_A], f"has no {role.value}, which the config asks for")
            if role in keys and TensorRole.LORA_A not in keys:
                raise self._refuse(keys[role], "is there without lora_A and lora_B")
        is_resized = target.kind is Kind.HEAD and self.vocab_size != target.outputs.full
        has_tokens = target.kind in (Kind.EMBEDDING, Kind.HEAD)
        for role, is_wrong, reason in (
            (TensorRole.LORA_BIAS, is_resized, "is for a head with another vocabulary, which is not supported"),
            (TensorRole.WEIGHT, target.kind is Kind.LINEAR, "replaces a whole linear layer, which is not supported"),
            (TensorRole.TOKEN_ROWS, not has_tokens, "has rows of tokens for a module that has none"),
            (TensorRole.WEIGHT, target.weight is None, "is a weight for a module that has none"),
            (TensorRole.BIAS, target.bias is None, "is a bias for a module that has none"),
        ):
            if is_wrong and role in keys:
                raise self._refuse(keys[role], reason)

    def _check_shapes(self, target: AdapterTarget, keys: Mapping[TensorRole, str]) -> None:
        for role, key in keys.items():
            shape, expected = self.tensors[key].shape, self._expected_shape(target, role)
            if shape != expected:
                raise self._refuse(key, f"has shape {shape}, but should have {expected} for this base model and config")

    def _expected_shape(self, target: AdapterTarget, role: TensorRole) -> tuple[int, ...]:
        inputs, outputs = target.inputs.full, target.outputs.full
        if target.kind is Kind.EMBEDDING:
            inputs = self._vocab_size_at(target.name, inputs) or inputs
        elif target.kind is Kind.HEAD:
            outputs = self._vocab_size_at(target.name, outputs) or outputs
        size = outputs if target.kind is Kind.EMBEDDING else inputs
        if role is TensorRole.WEIGHT:
            return (inputs if target.kind is Kind.EMBEDDING else outputs, size)[: 1 if target.kind is Kind.NORM else 2]
        rank, (a_blocks, b_blocks) = self._ranks.get(target.name, self.config.r), self._count_blocks(target.name)
        if inputs % a_blocks or outputs % b_blocks or rank % a_blocks or rank % b_blocks:
            raise AdapterError(
                f"adapter {self.name!r}: {a_blocks * b_blocks} blocks do not divide rank {rank} and size of "
                f"{target.name!r}"
            )
        return {
            TensorRole.LORA_A: (rank, inputs // a_blocks),
            TensorRole.LORA_B: (outputs, rank // b_blocks),
            TensorRole.TOKEN_ROWS: (len(self._token_ids.get(target.name, ())), size),
        }.get(role, (outputs,))
