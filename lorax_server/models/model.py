"""The base of models that are served through messages."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.models.types import Batch, Generation
from lorax_server.text.detokenizer import make_detokenizer


class TokenizerManager:
    """By adapter index: the tokenizer an adapter was trained with, where it differs from the base model's."""

    def __init__(self) -> None:
        self._tokenizers: dict[int, Any] = {}

    def add_tokenizer(self, adapter_index: int, tokenizer: Any) -> None:
        self._tokenizers[adapter_index] = tokenizer

    def get_tokenizer(self, adapter_index: int, default: Any) -> Any:
        return self._tokenizers.get(adapter_index, default)


class Model(ABC):
    """A model, its tokenizer, and its place among the ranks."""

    dynamic_adapter_loading_enabled = True

    def __init__(
        self,
        model_id: str,
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        requires_padding: bool,
        dtype: torch.dtype,
        device: torch.device,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.model_id = model_id
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.tokenizers = TokenizerManager()
        self.detokenizer = make_detokenizer(tokenizer)
        self.requires_padding = requires_padding
        self.dtype = dtype
        self.device = device
        process_group = process_group or FakeGroup()
        self.rank, self.world_size = process_group.rank(), process_group.size()

    @property
    @abstractmethod
    def batch_type(self) -> type[Batch]: ...

    @abstractmethod
    def generate_token(self, batch: Any) -> tuple[list[Generation], Batch | None]:
        """Compute one step: the next token of every request, and the batch to continue with, if any is left."""
