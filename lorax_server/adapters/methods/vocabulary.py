"""The tokens that an adapter has rows for, and the size of the vocabulary that this makes."""

from collections.abc import Mapping

from lorax_server.adapters.checkpoint import TensorInfo, TensorRole
from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.target import AdapterTarget
from lorax_server.errors import AdapterError


def find_token_ids(config: AdapterConfig, embedding: AdapterTarget, head: AdapterTarget) -> dict[str, tuple[int, ...]]:
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


class AdapterVocabulary:
    """The rows of an adapter's embedding and head."""

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, TensorInfo],
        keys: Mapping[str, Mapping[TensorRole, str]],
        token_ids: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._name = name
        self._tensors = tensors
        self._keys = keys
        self._token_ids = token_ids

    def find_size(self, embedding: AdapterTarget, head: AdapterTarget) -> int:
        """Return the base model's, unless the adapter brings a head of another size."""
        base = head.outputs.full
        sizes = {target.name: self.size_at(target.name, base) for target in (embedding, head)}
        changed = {name: size for name, size in sizes.items() if size is not None}
        grows = max(changed.values(), default=base) > base
        if len(set(changed.values())) > 1 or (grows and len(changed) == 1):
            raise AdapterError(
                f"adapter {self._name!r} changes the vocabulary, but not alike in embedding and head: it has "
                + " and ".join(f"{size or base} rows at {name!r}" for name, size in sizes.items())
            )
        return next(iter(changed.values()), base)

    def size_at(self, module: str, base: int) -> int | None:
        """Return the number of tokens of the adapter at an embedding or head; None where it keeps the base model's."""
        keys = self._keys.get(module, {})
        stored = base
        if TensorRole.WEIGHT in keys:
            shape = self._tensors[keys[TensorRole.WEIGHT]].shape
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

    def _refuse(self, key: str, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self._name!r}: tensor {key!r} {reason}")
