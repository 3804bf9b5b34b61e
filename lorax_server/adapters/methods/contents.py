"""Groups adapter tensors by module and role, and validates them against the config and the base model."""

from collections.abc import Mapping

from lorax_server.adapters.checkpoint import RENAMED_MODULES, TensorInfo, TensorRole, assign_tensors, find_projections
from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.methods.experts import ExpertFactors
from lorax_server.adapters.methods.fields import Method
from lorax_server.adapters.methods.matrices import find_gram_size
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.errors import AdapterError

MAX_KASA_WORK = 2**35  # sum of cubed Gram matrix sizes; takes about 30 seconds on one core
FACTOR_ROLES = (TensorRole.LORA_A, TensorRole.LORA_B)
# Tensors that each method trains at its target modules.
TRAINED_ROLES = {
    Method.LORA: FACTOR_ROLES,
    Method.IA3: (TensorRole.IA3,),
    Method.VERA: (TensorRole.VERA_B, TensorRole.VERA_D),
    Method.LN_TUNING: (TensorRole.TUNED_WEIGHT, TensorRole.TUNED_BIAS),
}
OTHER_ROLES = {TensorRole.WEIGHT, TensorRole.BIAS}
LORA_ROLES = {TensorRole.LORA_BIAS, TensorRole.MAGNITUDE, TensorRole.DIAGONAL, TensorRole.TOKEN_ROWS}


class AdapterContents:
    """An adapter's tensors, grouped by module. The constructor raises AdapterError if they do not match the config or
    the base model.
    """

    def __init__(
        self, config: AdapterConfig, tensors: Mapping[str, TensorInfo], targets: Mapping[str, AdapterTarget]
    ) -> None:
        self.name, self.config, self.tensors = config.name, config, tensors
        others = (TargetKind.INPUT, TargetKind.EXPERTS)
        self._targets = {name: target for name, target in targets.items() if target.kind not in others}
        experts = [target for target in targets.values() if target.kind is TargetKind.EXPERTS]
        self.experts = ExpertFactors(config, tensors, experts)
        # Keys of VeRA's shared matrices A and B.
        self.projections = find_projections(tensors, self.name) if config.method is Method.VERA else {}
        remaining = tensors.keys() - self.projections.values() - self.experts.keys
        self.keys, self._checkpoint_names = assign_tensors(remaining, self._targets, self.name)
        by_kind = {target.kind: target for target in targets.values()}
        # Models that do not generate text have no LM head.
        self._embedding, self._head = by_kind[TargetKind.EMBEDDING], by_kind.get(TargetKind.HEAD)
        self._vocabularies = [target for target in (self._embedding, self._head) if target is not None]
        self._check_modules()
        # Computed once, because pattern matching has a time budget.
        names = {module: self._find_config_name(name) for module, name in self._checkpoint_names.items()}
        self._ranks = {module: config.rank(name) for module, name in names.items()}
        self.scales = {module: config.scale(name) for module, name in names.items() if config.method is Method.LORA}
        self._share_tied_rank()
        self._replaced_modules = self._find_replaced_modules()
        self.token_ids = _find_token_ids(config, self._embedding, self._head)
        self._share_tied_rows()
        self._check_complete()
        self.vocab_size = self._find_vocab_size()
        self.input_scales = self._assign_input_scales()
        for module, keys in self.keys.items():
            self._check_roles(targets[module], keys)
            for role, key in keys.items():
                self._check_shape(key, self._expected_shape(targets[module], role))
        self._check_projections()
        self._check_kasa()
        self._check_invocation()

    def count_blocks(self, module: str) -> tuple[int, int]:
        """Return the number of diagonal blocks in LoRA A and in LoRA B. Both are 1 unless the adapter is a BD-LoRA
        adapter.
        """
        return self.config.count_blocks(self._checkpoint_names.get(module, module))

    def find_rank(self, module: str) -> int:
        """Return the LoRA rank at a module on this tensor-parallel rank, or 0 if the module has no LoRA factors."""
        if module in self.experts.by_target:
            return self.experts.by_target[module].rank
        keys = self.keys[module]
        if TensorRole.VERA_B in keys:
            return self.config.r
        if TensorRole.LORA_A in keys:
            return self._ranks[module] * (2 if TensorRole.DIAGONAL in keys else 1)
        if TensorRole.WEIGHT in keys and self._targets[module].kind is TargetKind.LINEAR:
            return min(self._targets[module].inputs.size, self._targets[module].outputs.size)
        return 0

    def _error(self, key: str, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self.name!r}: tensor {key!r} {reason}")

    def _check_modules(self) -> None:
        """Check that the file has trained tensors for exactly the modules that the config targets."""
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
                    f"adapter {self.name!r}: the file has trained tensors for module {module!r}, which target_modules, "
                    "exclude_modules or layers_to_transform in the config exclude"
                )

    def _is_target(self, target: AdapterTarget) -> bool | None:
        if target.kind is TargetKind.NORM and self.config.method is not Method.LN_TUNING:
            return False
        old_names = [old for old, new in RENAMED_MODULES.items() if new == target.name]
        names = [self._checkpoint_names.get(target.name, target.name), target.name, *old_names]
        if target.kind is TargetKind.LINEAR and any(
            self.config.is_target_parameter(f"{name}.weight") for name in names
        ):
            return True
        matches = [self.config.is_target(name) for name in names]
        if True in matches:
            return True
        if None in matches and self.config.target_modules == "all-linear":
            return target.kind is TargetKind.LINEAR
        if self.config.ensure_weight_tying and target in self._vocabularies:
            return None  # PEFT may adapt embedding and head if they are tied
        return matches[0]

    def _find_config_name(self, name: str) -> str:
        """Return the name that the patterns in the config must match: the parameter name if `target_parameters` targets
        the module, or else the module name.
        """
        parameter = f"{name}.weight"
        return parameter if self.config.is_target_parameter(parameter) else name

    def _share_tied_rank(self) -> None:
        """Use the embedding's rank for the head if PEFT ties their factors, even if a pattern sets another rank.

        The head's scale still uses the rank from the config.
        """
        embedding, head = self._embedding, self._head
        if head is None or not self.config.ensure_weight_tying or embedding.weight is not head.weight:
            return
        if all(TensorRole.LORA_A in self.keys.get(target.name, {}) for target in (embedding, head)):
            self._ranks[head.name] = self._ranks[embedding.name]

    def _find_replaced_modules(self) -> set[str]:
        """Return the modules that the adapter replaces entirely: `modules_to_save` and LN tuning targets."""
        replaced = {module for module in self._targets if self._is_in_modules_to_save(module)}
        if self.config.method is not Method.LN_TUNING:
            return replaced
        for module, keys in self.keys.items():
            for tuned, role in ((TensorRole.TUNED_WEIGHT, TensorRole.WEIGHT), (TensorRole.TUNED_BIAS, TensorRole.BIAS)):
                # PEFT saves the base weight together with a trained embedding or head.
                if tuned in keys and ".base_layer." not in keys.get(role, ".base_layer."):
                    raise self._error(keys[tuned], f"duplicates {keys[role]!r}")
                if tuned in keys:
                    keys[role] = keys.pop(tuned)
                    replaced.add(module)
        return replaced

    def _is_in_modules_to_save(self, module: str) -> bool:
        """Return True if `modules_to_save` names the module or one of its parents."""
        words = self._checkpoint_names.get(module, module).split(".")
        return any(".".join(words[: i + 1]).endswith(self.config.modules_to_save) for i in range(len(words)))

    def _assign_input_scales(self) -> dict[str, tuple[str, int]]:
        """Return the IA3 input scales, keyed by the target that produces the scaled inputs.

        Each value contains the module whose inputs are scaled, and the index of the first target output that the scale
        applies to. The targets are also added to `keys`.
        """
        assigned: dict[str, tuple[str, int]] = {}
        for module, keys in tuple(self.keys.items()):
            if TensorRole.IA3 not in keys:
                continue
            key, is_feedforward = keys[TensorRole.IA3], self.config.is_feedforward(self._checkpoint_names[module])
            if is_feedforward is None:
                is_feedforward = self.tensors[key].shape[:1] == (1,)
            if not is_feedforward:
                continue
            scale_target = self._targets[module].input_scale_target
            if scale_target is None:
                raise self._error(key, "scales inputs, which is supported only for the last linear layer of an MLP")
            self.keys.setdefault(scale_target[0], {})
            assigned[scale_target[0]] = module, scale_target[1]
        return assigned

    def scales_inputs(self, module: str) -> bool:
        """Return True if this module's IA3 vector scales its inputs. A preceding target then applies the vector."""
        return any(reader == module for reader, _ in self.input_scales.values())

    def _share_tied_rows(self) -> None:
        """If the embedding and the LM head are tied, apply the replaced rows of either module to both modules.

        `modules_to_save` is excluded, because PEFT copies the weight for that module only.
        """
        embedding, head = self._embedding, self._head
        if head is None or embedding.weight is not head.weight:
            return
        embedding_keys, head_keys = self.keys.get(embedding.name, {}), self.keys.get(head.name, {})
        for source, keys, destination in ((embedding, embedding_keys, head), (head, head_keys, embedding)):
            if TensorRole.WEIGHT in keys and source.name not in self._replaced_modules:
                self.keys.setdefault(destination.name, {}).setdefault(TensorRole.WEIGHT, keys[TensorRole.WEIGHT])
        if TensorRole.TOKEN_ROWS in embedding_keys:
            rows = embedding_keys[TensorRole.TOKEN_ROWS]
            self.keys.setdefault(head.name, {}).setdefault(TensorRole.TOKEN_ROWS, rows)
            self.token_ids.setdefault(head.name, self.token_ids.get(embedding.name, ()))

    def _check_complete(self) -> None:
        """Raise AdapterError if the file lacks tensors that the config requires."""
        for module, target in self._targets.items():
            required = [TensorRole.TOKEN_ROWS] if self.token_ids.get(module) else []
            if module in self._replaced_modules:
                required += [TensorRole.WEIGHT] * (target.weight is not None)
                required += [TensorRole.BIAS] * (target.bias is not None)
            if target.kind is TargetKind.CLASSIFIER and target.weight is None:  # the base model has no such layer
                required += [TensorRole.WEIGHT]
            for role in required:
                if role not in self.keys.get(module, {}):
                    raise AdapterError(
                        f"adapter {self.name!r}: module {module!r} has no {role.value} in the file, but "
                        "modules_to_save, target_modules or trainable_token_indices in the config require it"
                    )

    def _find_vocab_size(self) -> int:
        """Return the vocabulary size with this adapter. Raise AdapterError if embedding and head have
        different sizes.
        """
        base = self._embedding.inputs.full
        sizes = {target.name: self._count_tokens(target.name, base) for target in self._vocabularies}
        changed = {name: size for name, size in sizes.items() if size is not None}
        grows = max(changed.values(), default=base) > base
        if len(set(changed.values())) > 1 or (grows and len(changed) < len(sizes)):
            raise AdapterError(
                f"adapter {self.name!r} changes the vocabulary differently in embedding and head: it has "
                + " and ".join(f"{size or base} rows at {name!r}" for name, size in sizes.items())
            )
        return next(iter(changed.values()), base)

    def _count_tokens(self, module: str, base: int) -> int | None:
        """Return the number of tokens in the adapter's embedding or head, or None if the adapter does not change it."""
        keys = self.keys.get(module, {})
        stored = base
        if TensorRole.WEIGHT in keys:
            shape = self.tensors[keys[TensorRole.WEIGHT]].shape
            if len(shape) != 2 or shape[0] == 0:
                raise self._error(keys[TensorRole.WEIGHT], f"has shape {shape}, invalid for an embedding or head")
            stored = shape[0]
        size = stored
        if TensorRole.TOKEN_ROWS in keys:
            token_ids = self.token_ids.get(module, ())
            size = max(stored, 1 + max(token_ids, default=0))
            if len({token_id for token_id in token_ids if token_id >= stored}) != size - stored:
                raise self._error(keys[TensorRole.TOKEN_ROWS], f"does not cover tokens {stored} to {size - 1}")
        return None if size == base and TensorRole.WEIGHT not in keys else size

    def _check_roles(self, target: AdapterTarget, keys: Mapping[TensorRole, str]) -> None:
        """Reject combinations of tensors that are invalid for this module."""
        method = self.config.method
        served = {*TRAINED_ROLES[method], *OTHER_ROLES, *(LORA_ROLES if method is Method.LORA else ())}
        for role, key in keys.items():
            if role not in served:
                raise self._error(key, f"does not belong to {method.value}, the peft_type in the config")
        for first, second in (FACTOR_ROLES, TRAINED_ROLES[Method.VERA]):
            if (first in keys) != (second in keys):
                present = keys.get(first) or keys[second]
                raise self._error(present, f"has no counterpart: {first.value} and {second.value} are both required")
        self._check_optional_tensors(keys)
        is_resized = target.kind is TargetKind.HEAD and self.vocab_size != target.outputs.full
        has_tokens = target.kind in (TargetKind.EMBEDDING, TargetKind.HEAD)
        is_matrix, is_linear = target.kind in (TargetKind.LINEAR, TargetKind.HEAD), target.kind is TargetKind.LINEAR
        is_classifier = target.kind is TargetKind.CLASSIFIER
        is_unexpected = is_linear and target.name not in self._replaced_modules
        is_changed_twice = is_linear and any(role in keys for role in TRAINED_ROLES[method])
        for role, is_wrong, reason in (
            (TensorRole.LORA_BIAS, is_resized, "is for a head with another vocabulary size, which is not supported"),
            (TensorRole.IA3, is_resized, "is for a head with another vocabulary size, which is not supported"),
            (TensorRole.IA3, not is_matrix, "scales a module that is not a linear layer"),
            (TensorRole.VERA_B, not is_matrix, "scales a module that is not a linear layer"),
            (TensorRole.DIAGONAL, not is_linear, "is KaSA for an embedding or head, which is not supported"),
            (
                TensorRole.LORA_A,
                is_classifier and target.weight is None and TensorRole.WEIGHT not in keys,
                "is for a classification head that the base model does not have",
            ),
            (TensorRole.WEIGHT, is_unexpected, "replaces a linear layer that is not in modules_to_save"),
            (
                TensorRole.WEIGHT,
                is_changed_twice,
                "replaces a linear layer that other tensors also change",
            ),
            (TensorRole.TOKEN_ROWS, not has_tokens, "has token rows, but the module is not an embedding or head"),
            (
                TensorRole.WEIGHT,
                target.weight is None and not is_classifier,
                "is a weight for a module without a weight",
            ),
            (TensorRole.BIAS, target.bias is None and not is_classifier, "is a bias for a module without a bias"),
        ):
            if is_wrong and role in keys:
                raise self._error(keys[role], reason)

    def _check_optional_tensors(self, keys: Mapping[TensorRole, str]) -> None:
        """Check that a module has exactly the optional tensors that the config enables."""
        for is_configured, role in (
            (self.config.use_dora, TensorRole.MAGNITUDE),
            (self.config.lora_bias, TensorRole.LORA_BIAS),
            (self.config.use_kasa, TensorRole.DIAGONAL),
        ):
            if role in keys and not is_configured:
                raise self._error(keys[role], f"is unexpected: the config does not enable {role.value}")
            if is_configured and TensorRole.LORA_A in keys and role not in keys:
                raise self._error(keys[TensorRole.LORA_A], f"has no {role.value}, which the config requires")
            if role in keys and TensorRole.LORA_A not in keys:
                raise self._error(keys[role], "requires lora_A and lora_B")

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of VeRA's shared matrices, which are as large as the largest target module requires."""
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
        """Raise AdapterError for KaSA on large matrices, because their decomposition would delay the loading of other
        adapters.
        """
        modules = [module for module, keys in self.keys.items() if TensorRole.DIAGONAL in keys]
        for module in modules:
            size = min(self._targets[module].inputs.full, self._targets[module].outputs.full)
            if self._ranks[module] >= size:
                raise AdapterError(
                    f"adapter {self.name!r}: KaSA rank {self._ranks[module]} at module {module!r} must be smaller than "
                    f"the matrix size {size}"
                )
        sizes = [find_gram_size(self._targets[module]) for module in modules]
        if sum(size**3 for size in sizes) > MAX_KASA_WORK:
            raise AdapterError(
                f"adapter {self.name!r}: KaSA at {len(sizes)} modules of size up to {max(sizes)} takes too long to "
                "decompose; merge the adapter into a separate model with PEFT's merge_and_unload"
            )

    def _check_invocation(self) -> None:
        """Raise AdapterError if an aLoRA adapter targets modules other than linear layers, as PEFT does."""
        if not self.config.invocation_tokens:
            return
        if self.experts.by_target:
            raise AdapterError(f"adapter {self.name!r}: aLoRA on experts is not supported")
        for module, keys in self.keys.items():
            if self._targets[module].kind is not TargetKind.LINEAR:
                raise self._error(next(iter(keys.values())), "belongs to aLoRA, which supports only linear layers")

    def _check_shape(self, key: str, expected: tuple[int, ...]) -> None:
        shape = self.tensors[key].shape
        if shape != expected:
            raise self._error(key, f"has shape {shape}, expected {expected} for this base model and config")

    def _expected_shape(self, target: AdapterTarget, role: TensorRole) -> tuple[int, ...]:
        inputs, outputs = target.inputs.full, target.outputs.full
        if target.kind is TargetKind.EMBEDDING:
            inputs = self._count_tokens(target.name, inputs) or inputs
        elif target.kind is TargetKind.HEAD or target.is_resizable:
            outputs = self._count_tokens(target.name, outputs) or outputs
        size = outputs if target.kind is TargetKind.EMBEDDING else inputs
        if role is TensorRole.WEIGHT and target.checkpoint_shape is not None:
            return target.checkpoint_shape
        if role is TensorRole.WEIGHT:
            return (inputs if target.kind is TargetKind.EMBEDDING else outputs, size)[
                : 1 if target.kind is TargetKind.NORM else 2
            ]
        rank, (a_blocks, b_blocks) = self._ranks.get(target.name, self.config.r), self.count_blocks(target.name)
        if inputs % a_blocks or outputs % b_blocks or rank % a_blocks or rank % b_blocks:
            raise AdapterError(
                f"adapter {self.name!r}: {a_blocks * b_blocks} blocks do not divide the rank {rank} and the size of "
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


def _find_token_ids(
    config: AdapterConfig, embedding: AdapterTarget, head: AdapterTarget | None
) -> dict[str, tuple[int, ...]]:
    """Return the trained token IDs, keyed by module. If the config contains a list, it applies to the embedding."""
    indices = config.token_indices
    if not isinstance(indices, Mapping):
        return {embedding.name: indices}
    token_ids: dict[str, tuple[int, ...]] = {}
    modules = [embedding.name] if head is None else [embedding.name, head.name]
    for name, ids in indices.items():
        matches = [module for module in modules if f".{module}".endswith(f".{name}")]
        if len(matches) != 1 or matches[0] in token_ids:
            raise AdapterError(
                f"adapter {config.name!r}: trainable_token_indices names {name[:80]!r}, which is not one of "
                f"{' and '.join(map(repr, modules))}, or a duplicate"
            )
        token_ids[matches[0]] = ids
    return token_ids
