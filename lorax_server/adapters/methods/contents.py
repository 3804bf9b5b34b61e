"""The tensors of an adapter's file, by module and role, held against its config and the base model."""

from collections.abc import Mapping

from lorax_server.adapters.checkpoint import RENAMED_MODULES, TensorInfo, TensorRole, assign_tensors, find_projections
from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.methods.fields import Method
from lorax_server.adapters.methods.matrices import find_product_size
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.errors import AdapterError

MAX_KASA_WORK = 2**35  # sum of cubes of sizes: about half a minute of one core
FACTORS = (TensorRole.LORA_A, TensorRole.LORA_B)
# What each method trains at its targets, and what it may have beside that.
TRAINED_ROLES = {
    Method.LORA: FACTORS,
    Method.IA3: (TensorRole.IA3,),
    Method.VERA: (TensorRole.VERA_B, TensorRole.VERA_D),
    Method.LN_TUNING: (TensorRole.TUNED_WEIGHT, TensorRole.TUNED_BIAS),
}
OTHER_ROLES = {TensorRole.WEIGHT, TensorRole.BIAS}
LORA_ROLES = {TensorRole.LORA_BIAS, TensorRole.MAGNITUDE, TensorRole.DIAGONAL, TensorRole.TOKEN_ROWS}


class AdapterContents:
    """The tensors that a file has for each module. Making it refuses, by name, whatever does not fit."""

    def __init__(
        self, config: AdapterConfig, tensors: Mapping[str, TensorInfo], targets: Mapping[str, AdapterTarget]
    ) -> None:
        self.name, self.config, self.tensors = config.name, config, tensors
        self._targets = {name: target for name, target in targets.items() if target.kind is not Kind.INPUT}
        # The keys of the matrices A and B that all modules of VeRA share.
        self.projections = find_projections(tensors, self.name) if config.method is Method.VERA else {}
        others = tensors.keys() - self.projections.values()
        self.keys, self._own_names = assign_tensors(others, self._targets, self.name)
        by_kind = {target.kind: target for target in targets.values()}
        self._embedding, self._head = by_kind[Kind.EMBEDDING], by_kind[Kind.HEAD]
        self._check_modules()
        # Once for all: patterns take time, of which an adapter has only so much.
        self._ranks = {module: config.rank(own_name) for module, own_name in self._own_names.items()}
        is_lora = config.method is Method.LORA
        self.scales = {module: config.scale(name) for module, name in self._own_names.items() if is_lora}
        self._share_tied_rank()
        self._copied = self._find_copies()
        self.token_ids = _find_token_ids(config, self._embedding, self._head)
        self._share_tied_rows()
        self._check_complete()
        self.vocab_size = self._find_vocab_size()
        self.input_scales = self._place_input_scales()  # by target: the module whose inputs it scales, and from where
        for module, keys in self.keys.items():
            self._check_roles(targets[module], keys)
            for role, key in keys.items():
                self._check_shape(key, self._expected_shape(targets[module], role))
        self._check_projections()
        self._check_kasa()

    def count_blocks(self, module: str) -> tuple[int, int]:
        """Return the numbers of blocks into which A and B fall."""
        return self.config.count_blocks(self._own_names.get(module, module))

    def find_rank(self, module: str) -> int:
        """Return the rank of the factors that a module gets on this tensor-parallel rank; 0 if it gets none."""
        keys = self.keys[module]
        if TensorRole.VERA_B in keys:
            return self.config.r
        if TensorRole.LORA_A in keys:
            return self._ranks[module] * (2 if TensorRole.DIAGONAL in keys else 1)
        if TensorRole.WEIGHT in keys and self._targets[module].kind is Kind.LINEAR:
            return min(self._targets[module].inputs.size, self._targets[module].outputs.size)
        return 0

    def _refuse(self, key: str, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self.name!r}: tensor {key!r} {reason}")

    def _check_modules(self) -> None:
        """Refuse a file whose modules are not those that the config targets."""
        roles = TRAINED_ROLES[self.config.method]
        for module, target in self._targets.items():
            is_target, keys = self._is_target(target), self.keys.get(module, {})
            is_trained = any(role in keys for role in roles)
            if is_target and not is_trained:
                raise AdapterError(
                    f"adapter {self.name!r}: module {module!r} is targeted but has no tensors in the file"
                )
            if is_target is False and is_trained:
                raise AdapterError(
                    f"adapter {self.name!r}: the file has trained tensors for module {module!r}, which the config's "
                    "target_modules, exclude_modules or layers_to_transform leave out"
                )

    def _is_target(self, target: AdapterTarget) -> bool | None:
        if target.kind is Kind.NORM and self.config.method is not Method.LN_TUNING:
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

    def _share_tied_rank(self) -> None:
        """Expect the embedding's factors at the head where PEFT ties them, whatever rank a pattern has for the head.

        The head's scale is still that of its own rank.
        """
        embedding, head = self._embedding, self._head
        is_tied = self.config.ensure_weight_tying and embedding.weight is head.weight
        if is_tied and all(TensorRole.LORA_A in self.keys.get(target.name, {}) for target in (embedding, head)):
            self._ranks[head.name] = self._ranks[embedding.name]

    def _find_copies(self) -> set[str]:
        """Return the modules that the adapter replaces as a whole: those that were saved, and those of LN tuning."""
        saved = {module for module in self._targets if self._is_saved(module)}
        if self.config.method is not Method.LN_TUNING:
            return saved
        for module, keys in self.keys.items():
            for tuned, role in ((TensorRole.TUNED_WEIGHT, TensorRole.WEIGHT), (TensorRole.TUNED_BIAS, TensorRole.BIAS)):
                # Beside the copy of an embedding or head that was trained, PEFT writes the base model's.
                if tuned in keys and ".base_layer." not in keys.get(role, ".base_layer."):
                    raise self._refuse(keys[tuned], f"and {keys[role]!r} are the same thing")
                if tuned in keys:
                    keys[role] = keys.pop(tuned)
                    saved.add(module)
        return saved

    def _is_saved(self, module: str) -> bool:
        """Tell whether `modules_to_save` names a module, or one that it is a part of."""
        words = self._own_names.get(module, module).split(".")
        return any(".".join(words[: i + 1]).endswith(self.config.modules_to_save) for i in range(len(words)))

    def _place_input_scales(self) -> dict[str, tuple[str, int]]:
        """Return, by the target that does it, the module whose inputs IA3 scales, and the first output they are."""
        placed: dict[str, tuple[str, int]] = {}
        for module, keys in tuple(self.keys.items()):
            if TensorRole.IA3 not in keys:
                continue
            key, is_feedforward = keys[TensorRole.IA3], self.config.is_feedforward(self._own_names[module])
            if is_feedforward is None:
                is_feedforward = self.tensors[key].shape[:1] == (1,)
            if not is_feedforward:
                continue
            place = self._targets[module].scaled_at
            if place is None:
                raise self._refuse(
                    key, "scales inputs, which is served only at the last matrix of a feed-forward layer"
                )
            self.keys.setdefault(place[0], {})
            placed[place[0]] = module, place[1]
        return placed

    def scales_inputs(self, module: str) -> bool:
        """Tell whether IA3's vector of this module scales its inputs, which another target does in its place."""
        return any(reader == module for reader, _ in self.input_scales.values())

    def _share_tied_rows(self) -> None:
        """Replace rows in embedding and head of a tied model alike: one matrix serves as both.

        Not so `modules_to_save`, of which PEFT makes a copy for the one module.
        """
        embedding, head = self._embedding, self._head
        if embedding.weight is not head.weight:
            return
        of_embedding, of_head = self.keys.get(embedding.name, {}), self.keys.get(head.name, {})
        for giver, keys, taker in ((embedding, of_embedding, head), (head, of_head, embedding)):
            if TensorRole.WEIGHT in keys and giver.name not in self._copied:
                self.keys.setdefault(taker.name, {}).setdefault(TensorRole.WEIGHT, keys[TensorRole.WEIGHT])
        if TensorRole.TOKEN_ROWS in of_embedding:
            rows = of_embedding[TensorRole.TOKEN_ROWS]
            self.keys.setdefault(head.name, {}).setdefault(TensorRole.TOKEN_ROWS, rows)
            self.token_ids.setdefault(head.name, self.token_ids.get(embedding.name, ()))

    def _check_complete(self) -> None:
        """Refuse a file that lacks what the config says was trained: the base model's would be served in its place."""
        for module, target in self._targets.items():
            required = [TensorRole.TOKEN_ROWS] if self.token_ids.get(module) else []
            if module in self._copied:
                required += [TensorRole.WEIGHT] * (target.weight is not None)
                required += [TensorRole.BIAS] * (target.bias is not None)
            for role in required:
                if role not in self.keys.get(module, {}):
                    raise AdapterError(
                        f"adapter {self.name!r}: module {module!r} has no {role.value} in the file, though the "
                        "config's modules_to_save, target_modules or trainable_token_indices ask for it"
                    )

    def _find_vocab_size(self) -> int:
        """Return the vocabulary size: the base model's, unless the adapter brings a head of another size."""
        base = self._head.outputs.full
        sizes = {target.name: self._count_tokens(target.name, base) for target in (self._embedding, self._head)}
        changed = {name: size for name, size in sizes.items() if size is not None}
        grows = max(changed.values(), default=base) > base
        if len(set(changed.values())) > 1 or (grows and len(changed) == 1):
            raise AdapterError(
                f"adapter {self.name!r} changes the vocabulary, but not alike in embedding and head: it has "
                + " and ".join(f"{size or base} rows at {name!r}" for name, size in sizes.items())
            )
        return next(iter(changed.values()), base)

    def _count_tokens(self, module: str, base: int) -> int | None:
        """Return the number of tokens of the adapter at an embedding or head; None where it keeps the base model's."""
        keys = self.keys.get(module, {})
        stored = base
        if TensorRole.WEIGHT in keys:
            shape = self.tensors[keys[TensorRole.WEIGHT]].shape
            if len(shape) != 2 or shape[0] == 0:
                raise self._refuse(keys[TensorRole.WEIGHT], f"has shape {shape}, which no embedding or head has")
            stored = shape[0]
        size = stored
        if TensorRole.TOKEN_ROWS in keys:
            token_ids = self.token_ids.get(module, ())
            size = max(stored, 1 + max(token_ids, default=0))
            if len({token_id for token_id in token_ids if token_id >= stored}) != size - stored:
                raise self._refuse(keys[TensorRole.TOKEN_ROWS], f"leaves out some of the tokens {stored} to {size - 1}")
        return None if size == base and TensorRole.WEIGHT not in keys else size

    def _check_roles(self, target: AdapterTarget, keys: Mapping[TensorRole, str]) -> None:
        """Refuse tensors that do not belong together, or not at this module."""
        method = self.config.method
        served = {*TRAINED_ROLES[method], *OTHER_ROLES, *(LORA_ROLES if method is Method.LORA else ())}
        for role, key in keys.items():
            if role not in served:
                raise self._refuse(key, f"is no tensor of {method.value}, which the config has as peft_type")
        for first, second in (FACTORS, TRAINED_ROLES[Method.VERA]):
            if (first in keys) != (second in keys):
                present = keys.get(first) or keys[second]
                raise self._refuse(present, f"has no counterpart: of {first.value} and {second.value} one is missing")
        self._check_beside_factors(keys)
        is_resized = target.kind is Kind.HEAD and self.vocab_size != target.outputs.full
        has_tokens = target.kind in (Kind.EMBEDDING, Kind.HEAD)
        is_matrix, is_linear = target.kind in (Kind.LINEAR, Kind.HEAD), target.kind is Kind.LINEAR
        is_unasked = is_linear and target.name not in self._copied
        is_twofold = is_linear and any(role in keys for role in TRAINED_ROLES[method])
        for role, is_wrong, reason in (
            (TensorRole.LORA_BIAS, is_resized, "is for a head with another vocabulary, which is not supported"),
            (TensorRole.IA3, is_resized, "is for a head with another vocabulary, which is not supported"),
            (TensorRole.IA3, not is_matrix, "scales a module that is no linear layer"),
            (TensorRole.VERA_B, not is_matrix, "scales a module that is no linear layer"),
            (TensorRole.DIAGONAL, not is_linear, "is KaSA of an embedding or a head, which is not supported"),
            (TensorRole.WEIGHT, is_unasked, "replaces a whole linear layer, which the config does not say"),
            (TensorRole.WEIGHT, is_twofold, "replaces a whole linear layer, which other tensors of the file change"),
            (TensorRole.TOKEN_ROWS, not has_tokens, "has rows of tokens for a module that has none"),
            (TensorRole.WEIGHT, target.weight is None, "is a weight for a module that has none"),
            (TensorRole.BIAS, target.bias is None, "is a bias for a module that has none"),
        ):
            if is_wrong and role in keys:
                raise self._refuse(keys[role], reason)

    def _check_beside_factors(self, keys: Mapping[TensorRole, str]) -> None:
        """Refuse a file that has not, beside each pair of factors, what the config says."""
        for is_asked, role in (
            (self.config.use_dora, TensorRole.MAGNITUDE),
            (self.config.lora_bias, TensorRole.LORA_BIAS),
            (self.config.use_kasa, TensorRole.DIAGONAL),
        ):
            if role in keys and not is_asked:
                raise self._refuse(keys[role], f"is there, though the config does not ask for {role.value}")
            if is_asked and TensorRole.LORA_A in keys and role not in keys:
                raise self._refuse(keys[TensorRole.LORA_A], f"has no {role.value}, which the config asks for")
            if role in keys and TensorRole.LORA_A not in keys:
                raise self._refuse(keys[role], "is there without lora_A and lora_B")

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of the matrices that all modules of VeRA share: each has a part of them."""
        adapted = [self._targets[module] for module, keys in self.keys.items() if TensorRole.VERA_B in keys]
        inputs = max((target.inputs.full for target in adapted), default=0)
        outputs = max((self._expected_shape(target, TensorRole.VERA_B)[0] for target in adapted), default=0)
        return {"A": (self.config.r, inputs), "B": (outputs, self.config.r)}

    def _check_projections(self) -> None:
        if self.config.method is not Method.VERA:
            return
        is_saved = self.config.projection_seed is None
        for matrix, expected in self.projection_shapes().items():
            if (matrix in self.projections) != is_saved:
                raise AdapterError(
                    f"adapter {self.name!r}: the config's save_projection is {str(is_saved).lower()}, but the file has "
                    f"{'no' if is_saved else 'a'} tensor 'base_model.vera_{matrix}'"
                )
            if is_saved:
                self._check_shape(self.projections[matrix], expected)

    def _check_kasa(self) -> None:
        """Refuse KaSA of matrices that are too large: their singular values are computed while other adapters wait."""
        modules = [module for module, keys in self.keys.items() if TensorRole.DIAGONAL in keys]
        for module in modules:
            size = min(self._targets[module].inputs.full, self._targets[module].outputs.full)
            if self._ranks[module] >= size:
                raise AdapterError(
                    f"adapter {self.name!r}: KaSA of rank {self._ranks[module]} at module {module!r} leaves nothing of "
                    f"the {size} singular values of its matrix"
                )
        sizes = [find_product_size(self._targets[module]) for module in modules]
        if sum(size**3 for size in sizes) > MAX_KASA_WORK:
            raise AdapterError(
                f"adapter {self.name!r}: KaSA at {len(sizes)} modules of up to {max(sizes)} rows needs more singular "
                "values of the base model's matrices than are computed while other adapters wait; merge it into a "
                "model of its own with PEFT's merge_and_unload"
            )

    def _check_shape(self, key: str, expected: tuple[int, ...]) -> None:
        shape = self.tensors[key].shape
        if shape != expected:
            raise self._refuse(key, f"has shape {shape}, but should have {expected} for this base model and config")

    def _expected_shape(self, target: AdapterTarget, role: TensorRole) -> tuple[int, ...]:
        inputs, outputs = target.inputs.full, target.outputs.full
        if target.kind is Kind.EMBEDDING:
            inputs = self._count_tokens(target.name, inputs) or inputs
        elif target.kind is Kind.HEAD:
            outputs = self._count_tokens(target.name, outputs) or outputs
        size = outputs if target.kind is Kind.EMBEDDING else inputs
        if role is TensorRole.WEIGHT and target.stored_shape is not None:
            return target.stored_shape
        if role is TensorRole.WEIGHT:
            return (inputs if target.kind is Kind.EMBEDDING else outputs, size)[: 1 if target.kind is Kind.NORM else 2]
        rank, (a_blocks, b_blocks) = self._ranks.get(target.name, self.config.r), self.count_blocks(target.name)
        if inputs % a_blocks or outputs % b_blocks or rank % a_blocks or rank % b_blocks:
            raise AdapterError(
                f"adapter {self.name!r}: {a_blocks * b_blocks} blocks do not divide rank {rank} and size of "
                f"{target.name!r}"
            )
        return {
            TensorRole.LORA_A: (rank, inputs // a_blocks),
            TensorRole.LORA_B: (outputs, rank // b_blocks),
            TensorRole.DIAGONAL: (rank,),
            TensorRole.IA3: (1, inputs) if self.scales_inputs(target.name) else (outputs, 1),
            TensorRole.VERA_D: (self.config.r,),
            TensorRole.TOKEN_ROWS: (len(self.token_ids.get(target.name, ())), size),
        }.get(role, (outputs,))


def _find_token_ids(config: AdapterConfig, embedding: AdapterTarget, head: AdapterTarget) -> dict[str, tuple[int, ...]]:
    """Return the tokens with trained rows by module. Without names the embedding is meant."""
    indices = config.token_indices
    if not isinstance(indices, Mapping):
        return {embedding.name: indices}
    token_ids: dict[str, tuple[int, ...]] = {}
    modules = [embedding.name, head.name]
    for name, ids in indices.items():
        fits = [module for module in modules if f".{module}".endswith(f".{name}")]
        if len(fits) != 1 or fits[0] in token_ids:
            raise AdapterError(
                f"adapter {config.name!r}: trainable_token_indices names {name[:80]!r}, which is not one of "
                f"{modules[0]!r} and {modules[1]!r}, or is named twice"
            )
        token_ids[fits[0]] = ids
    return token_ids
