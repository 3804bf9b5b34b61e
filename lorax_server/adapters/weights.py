"""An adapter's tensors, checked against the base model, one module at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Protocol

import torch

from lorax_server.adapters.checkpoint import RENAMED_MODULES, Part, assign_tensors, read_header
from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.identity import identify
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.names import WEIGHTS_FILE
from lorax_server.files.plain_file import Stamp, open_plain, stamp_of

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Besides factors, the weight that PEFT writes beside factors of an embedding or head, which is the base model's.
MERGEABLE_PARTS = (Part.LORA_A, Part.LORA_B, Part.WEIGHT)


@dataclass(frozen=True)
class ModuleWeights:
    """What an adapter has at one module: whole, on the CPU, in float32."""

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
    """An adapter, or what several were merged into."""

    name: str
    vocab_size: int

    @property
    def modules(self) -> list[str]: ...

    def load(self, module: str) -> ModuleWeights: ...

    def find_extra(self) -> str | None:
        """Something it has that is not a pair of factors, in words; such adapters cannot be merged."""
        ...


class StoredAdapter:
    """An adapter in a file. Opening it checks names and shapes; tensors are read when a module is loaded."""

    def __init__(
        self,
        folder: Path,
        config: AdapterConfig,
        targets: Mapping[str, AdapterTarget],
        stamp: Stamp | None = None,  # of the file that is meant
    ) -> None:
        self.name = config.name
        self.config = config
        self.path = folder / WEIGHTS_FILE
        self._stamp = self._stat()
        if stamp is not None and stamp != self._stamp:
            raise SourceError(f"adapter {self.name!r}: {self.path.name} changed after it was chosen; try again")
        self.tensors = read_header(self.path, self.name)
        assigned = assign_tensors(self.tensors, targets, self.name)
        self._written = {module: found.written for module, found in assigned.items()}
        self._parts = {module: found.keys for module, found in assigned.items()}
        self._check_modules(targets)
        # Once for all: patterns take time, of which an adapter has only so much.
        self._ranks = {module: config.rank(written) for module, written in self._written.items()}
        self._scales = {module: config.scale(written) for module, written in self._written.items()}
        self._token_ids = self._find_token_ids(targets)
        self._share_tied_rows(targets)
        self._check_complete(targets)
        self.vocab_size = self._find_vocab_size(targets)
        for module, parts in self._parts.items():
            self._check_parts(targets[module], parts)

    @property
    def modules(self) -> list[str]:
        return list(self._parts)

    def identify(self) -> str:
        identity = identify(self.config, self.path, self.tensors)
        self._check_unchanged()
        return identity

    def find_extra(self) -> str | None:
        if self.config.modules_to_save:
            return f"modules_to_save = {list(self.config.modules_to_save)}"
        keys = (key for parts in self._parts.values() for part, key in parts.items() if part not in MERGEABLE_PARTS)
        return next((f"such as {key!r}" for key in keys), None)

    def load(self, module: str) -> ModuleWeights:
        parts = self._parts[module]
        try:
            with open_plain(self.path) as file:
                self._check_same(stamp_of(file.fileno()))
                found = {part: self._read(file, key) for part, key in parts.items()}
        except OSError as error:
            raise self._lost(error) from error
        self._check_unchanged()
        lora_a, lora_b = found.get(Part.LORA_A), found.get(Part.LORA_B)
        if lora_a is not None and lora_b is not None:
            lora_a, lora_b = self._whole_factors(module, lora_a, lora_b)
        return ModuleWeights(
            lora_a=lora_a,
            lora_b=lora_b,
            scale=self._scales[module] if lora_a is not None else 0.0,
            magnitude=found.get(Part.MAGNITUDE),
            lora_bias=found.get(Part.LORA_BIAS),
            bias=found.get(Part.BIAS),
            weight=found.get(Part.WEIGHT),
            token_ids=self._token_ids.get(module, ()) if Part.TOKEN_ROWS in parts else (),
            token_rows=found.get(Part.TOKEN_ROWS),
        )

    def _stat(self) -> Stamp:
        try:
            return stamp_of(self.path)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> AdapterError:
        if isinstance(error, FileNotFoundError):  # it made room for others; naming the adapter fetches it again
            return SourceError(f"adapter {self.name!r}: {self.path.name} is not on this machine any more; try again")
        return AdapterError(f"adapter {self.name!r}: {self.path.name} cannot be read: {error.strerror}")

    def _check_unchanged(self) -> None:
        """Who an adapter is and what it computes must come from the same bytes."""
        self._check_same(self._stat())

    def _check_same(self, stamp: Stamp) -> None:
        if stamp != self._stamp:
            raise SourceError(f"adapter {self.name!r}: {self.path.name} changed while it was read; try again")

    def _read(self, file: BufferedReader, key: str) -> torch.Tensor:
        """Read, not mapped: a file that somebody cuts short while it is mapped kills the process."""
        info = self.tensors[key]
        content = bytearray(info.stop - info.start)
        file.seek(info.start)
        if file.readinto(content) != len(content):
            raise self._refuse(key, "is cut short: the file changed while it was read")
        if not content:
            return torch.empty(info.shape)
        tensor = torch.frombuffer(content, dtype=DTYPES[info.dtype]).view(info.shape).float()
        if not bool(tensor.isfinite().all()):
            raise self._refuse(key, "has numbers that are not finite")
        return tensor

    def _whole_factors(
        self, module: str, lora_a: torch.Tensor, lora_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """BD-LoRA stores only the blocks on the diagonal."""
        a_blocks, b_blocks = self._blocks(module)
        if a_blocks == b_blocks == 1:
            return lora_a, lora_b
        return torch.block_diag(*lora_a.chunk(a_blocks)), torch.block_diag(*lora_b.chunk(b_blocks))

    def _blocks(self, module: str) -> tuple[int, int]:
        """Into how many blocks A and B fall."""
        blocks, written = self.config.block_diagonal, self._written.get(module, module)
        if blocks is not None and any(name in written for name in blocks.a):
            return blocks.blocks, 1
        if blocks is not None and any(name in written for name in blocks.b):
            return 1, blocks.blocks
        return 1, 1

    def _refuse(self, key: str, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self.name!r}: tensor {key!r} {reason}")

    def _check_modules(self, targets: Mapping[str, AdapterTarget]) -> None:
        """What the config targets must be in the file, and nothing else."""
        for module, target in targets.items():
            parts = self._parts.get(module, {})
            wanted = self._is_target(target, targets)
            if wanted and Part.LORA_A not in parts and Part.LORA_B not in parts:
                raise AdapterError(
                    f"adapter {self.name!r}: module {module!r} is targeted but has no tensors in the file"
                )
            if wanted is False and (Part.LORA_A in parts or Part.LORA_B in parts):
                raise AdapterError(
                    f"adapter {self.name!r}: the file has factors for module {module!r}, which the config's "
                    "target_modules, exclude_modules or layers_to_transform leave out"
                )

    def _is_target(self, target: AdapterTarget, targets: Mapping[str, AdapterTarget]) -> bool | None:
        if target.kind is Kind.NORM:
            return False
        old_names = [old for old, new in RENAMED_MODULES.items() if new == target.name]
        names = [self._written.get(target.name, target.name), target.name, *old_names]
        answers = [self.config.is_target(name) for name in names]
        if True in answers:
            return True
        if None in answers and self.config.target_modules == "all-linear":
            return target.kind is Kind.LINEAR
        if self.config.ensure_weight_tying and target in _vocabulary_targets(targets):
            return None  # PEFT may adapt it because the other one is
        return answers[0]

    def _share_tied_rows(self, targets: Mapping[str, AdapterTarget]) -> None:
        """One matrix serves as embedding and head of a tied model: what replaces its rows does so in both.

        Not so `modules_to_save`, of which PEFT makes a copy for the one module.
        """
        embedding, head = _vocabulary_targets(targets)
        if not _are_tied(embedding, head):
            return
        of_embedding, of_head = self._parts.get(embedding.name, {}), self._parts.get(head.name, {})
        for giver, parts, taker in ((embedding, of_embedding, head), (head, of_head, embedding)):
            if Part.WEIGHT in parts and not self._is_saved(giver.name):
                self._parts.setdefault(taker.name, {}).setdefault(Part.WEIGHT, parts[Part.WEIGHT])
        if Part.TOKEN_ROWS in of_embedding:
            self._parts.setdefault(head.name, {}).setdefault(Part.TOKEN_ROWS, of_embedding[Part.TOKEN_ROWS])
            self._token_ids.setdefault(head.name, self._token_ids.get(embedding.name, ()))

    def _is_saved(self, module: str) -> bool:
        return any(self._written.get(module, module).endswith(name) for name in self.config.modules_to_save)

    def _check_complete(self, targets: Mapping[str, AdapterTarget]) -> None:
        """What the config says was trained must be in the file, or the base model's would be served in its place."""
        for module, target in targets.items():
            parts = self._parts.get(module, {})
            wanted = [Part.TOKEN_ROWS] if self._token_ids.get(module) else []
            if self._is_saved(module):
                wanted += [Part.WEIGHT] * (target.weight is not None) + [Part.BIAS] * (target.bias is not None)
            for part in wanted:
                if part not in parts:
                    raise AdapterError(
                        f"adapter {self.name!r}: module {module!r} has no {part.value} in the file, though the "
                        "config's modules_to_save or trainable_token_indices ask for it"
                    )

    def _find_vocab_size(self, targets: Mapping[str, AdapterTarget]) -> int:
        """That of the base model, unless the adapter brings a head of another size."""
        embedding, head = _vocabulary_targets(targets)
        base = head.outputs.full
        sizes = {target.name: self._vocab_size_at(target.name, base) for target in (embedding, head)}
        named = {name: size for name, size in sizes.items() if size is not None}
        grows = max(named.values(), default=base) > base
        if len(set(named.values())) > 1 or (grows and len(named) == 1):
            raise AdapterError(
                f"adapter {self.name!r} changes the vocabulary, but not alike in embedding and head: it has "
                + " and ".join(f"{size or base} rows at {name!r}" for name, size in sizes.items())
            )
        return named.get(head.name, named.get(embedding.name, base))

    def _vocab_size_at(self, module: str, base: int) -> int | None:
        """How many tokens the adapter has at an embedding or head; None where it leaves them as they are."""
        parts = self._parts.get(module, {})
        if Part.WEIGHT not in parts and Part.TOKEN_ROWS not in parts:
            return None
        stored = base
        if Part.WEIGHT in parts:
            shape = self.tensors[parts[Part.WEIGHT]].shape
            if len(shape) != 2 or shape[0] == 0:
                raise self._refuse(parts[Part.WEIGHT], f"has shape {shape}, which no embedding or head has")
            stored = shape[0]
        if Part.TOKEN_ROWS not in parts:
            return stored
        tokens = self._token_ids.get(module, ())
        size = max(stored, 1 + max(tokens, default=0))
        added = {token for token in tokens if token >= stored}
        if len(added) != size - stored:
            raise self._refuse(parts[Part.TOKEN_ROWS], f"leaves out some of the tokens {stored} to {size - 1}")
        return None if size == base and Part.WEIGHT not in parts else size

    def _find_token_ids(self, targets: Mapping[str, AdapterTarget]) -> dict[str, tuple[int, ...]]:
        """By module: the tokens that have trained rows. Without names it is the embedding that is meant."""
        embedding, head = _vocabulary_targets(targets)
        indices = self.config.token_indices
        if not isinstance(indices, Mapping):
            return {embedding.name: indices}
        found: dict[str, tuple[int, ...]] = {}
        for name, ids in indices.items():
            fits = [module.name for module in (embedding, head) if f".{module.name}".endswith(f".{name}")]
            if len(fits) != 1 or fits[0] in found:
                raise AdapterError(
                    f"adapter {self.name!r}: trainable_token_indices names {name[:80]!r}, which is not one of "
                    f"{embedding.name!r} and {head.name!r}, or is named twice"
                )
            found[fits[0]] = ids
        return found

    def _check_parts(self, target: AdapterTarget, parts: Mapping[Part, str]) -> None:
        if (Part.LORA_A in parts) != (Part.LORA_B in parts):
            present = parts[Part.LORA_A if Part.LORA_A in parts else Part.LORA_B]
            raise self._refuse(present, "has no counterpart: of lora_A and lora_B one is missing")
        for wanted, part in ((self.config.use_dora, Part.MAGNITUDE), (self.config.lora_bias, Part.LORA_BIAS)):
            if part in parts and not wanted:
                raise self._refuse(parts[part], f"is there, though the config does not ask for {part.value}")
            if wanted and Part.LORA_A in parts and part not in parts:
                raise self._refuse(parts[Part.LORA_A], f"has no {part.value}, which the config asks for")
            if part in parts and Part.LORA_A not in parts:
                raise self._refuse(parts[part], "is there without lora_A and lora_B")
        if Part.LORA_BIAS in parts and target.kind is Kind.HEAD and self.vocab_size != target.outputs.full:
            raise self._refuse(parts[Part.LORA_BIAS], "is for a head with another vocabulary, which is not supported")
        if Part.WEIGHT in parts and target.kind is Kind.LINEAR:
            raise self._refuse(parts[Part.WEIGHT], "replaces a whole linear layer, which is not supported")
        if Part.TOKEN_ROWS in parts and target.kind not in (Kind.EMBEDDING, Kind.HEAD):
            raise self._refuse(parts[Part.TOKEN_ROWS], "has rows of tokens for a module that has none")
        if Part.WEIGHT in parts and target.weight is None:
            raise self._refuse(parts[Part.WEIGHT], "is a weight for a module that has none")
        if Part.BIAS in parts and target.bias is None:
            raise self._refuse(parts[Part.BIAS], "is a bias for a module that has none")
        for part, key in parts.items():
            shape, expected = self.tensors[key].shape, self._expected_shape(target, part)
            if shape != expected:
                raise self._refuse(key, f"has shape {shape}, but should have {expected} for this base model and config")

    def _expected_shape(self, target: AdapterTarget, part: Part) -> tuple[int, ...]:
        inputs, outputs = target.inputs.full, target.outputs.full
        if target.kind is Kind.EMBEDDING:
            inputs = self._vocab_size_at(target.name, inputs) or inputs
        elif target.kind is Kind.HEAD:
            outputs = self._vocab_size_at(target.name, outputs) or outputs
        size = outputs if target.kind is Kind.EMBEDDING else inputs
        if part is Part.WEIGHT:
            return (inputs if target.kind is Kind.EMBEDDING else outputs, size)[: 1 if target.kind is Kind.NORM else 2]
        rank, (a_blocks, b_blocks) = self._ranks.get(target.name, self.config.r), self._blocks(target.name)
        if inputs % a_blocks or outputs % b_blocks or rank % a_blocks or rank % b_blocks:
            raise AdapterError(
                f"adapter {self.name!r}: {a_blocks * b_blocks} blocks do not divide rank {rank} and size of "
                f"{target.name!r}"
            )
        return {
            Part.LORA_A: (rank, inputs // a_blocks),
            Part.LORA_B: (outputs, rank // b_blocks),
            Part.TOKEN_ROWS: (len(self._token_ids.get(target.name, ())), size),
        }.get(part, (outputs,))


def _vocabulary_targets(targets: Mapping[str, AdapterTarget]) -> tuple[AdapterTarget, AdapterTarget]:
    by_kind = {target.kind: target for target in targets.values()}
    return by_kind[Kind.EMBEDDING], by_kind[Kind.HEAD]


def _are_tied(embedding: AdapterTarget, head: AdapterTarget) -> bool:
    return embedding.weight is head.weight
