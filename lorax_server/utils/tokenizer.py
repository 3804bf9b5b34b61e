"""The tokenizers that adapters bring with them."""

from typing import Any


class TokenizerManager:
    """By adapter index: the tokenizer an adapter was trained with, where it differs from the base model's."""

    def __init__(self) -> None:
        self._tokenizers: dict[int, Any] = {}

    def add_tokenizer(self, adapter_index: int, tokenizer: Any) -> None:
        self._tokenizers[adapter_index] = tokenizer

    def remove_tokenizer(self, adapter_index: int) -> None:
        self._tokenizers.pop(adapter_index, None)

    def get_tokenizer(self, adapter_index: int, default: Any) -> Any:
        return self._tokenizers.get(adapter_index, default)
