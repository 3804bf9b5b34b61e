"""Count a model's tensors by building the served model on torch's meta device, without weights or memory."""

import json
import math
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from lorax_server.adapters.host import UNIT_BYTES
from lorax_server.adapters.target import TargetKind
from lorax_server.config import ModelConfig
from lorax_server.distributed import FakeGroup, Shard
from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE
from lorax_server.kernels import reference
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.registry import build_model, load_config
from lorax_server.weights import Weights
from lorax_server.worker.facts import find_max_length
from lorax_server.worker.memory import block_bytes

MAX_LAYERS = 1000  # a config with more layers is a mistake, and would take minutes to build
HALF_BYTES = 2  # bytes of a bfloat16 or float16 number


class MatrixSize(NamedTuple):
    """A linear layer, by the module name that adapters use."""

    name: str
    outputs: int
    inputs: int


class MetaWeights(Weights):
    """Provide an empty meta tensor for each tensor that a model requests, and count their elements."""

    def __init__(self) -> None:
        device, group = torch.device("meta"), FakeGroup()
        super().__init__({}, device=device, dtype=torch.bfloat16, process_group=group, ops=reference)
        self.parameters = 0

    def has(self, name: str) -> bool:  # noqa: ARG002 - optional tensors, such as the head of a tied pair, are absent
        return False

    def get_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        assert shape is not None, name
        self.parameters += math.prod(shape)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def get_sharded(self, name: str, dim: int, shard: Shard, shape: tuple[int, ...] | None = None) -> torch.Tensor:  # noqa: ARG002
        return self.get_tensor(name, shape)


class ModelSizes:
    """Sizes of a model in half precision."""

    def __init__(self, config: Any) -> None:
        """Build a config's model on the meta device and measure it."""
        if config.num_hidden_layers > MAX_LAYERS:
            raise ConfigError(f"config field num_hidden_layers must be at most {MAX_LAYERS}")
        weights = MetaWeights()
        try:
            model = build_model(config, weights)
        except (RuntimeError, TypeError, OverflowError) as error:  # torch raises these for sizes beyond 64 bits
            raise ConfigError(f"the config's sizes are too large: {str(error).splitlines()[0]}") from error
        head = model.lm_head.targets[0]
        linears = [target for target in collect_adapter_targets(model).values() if target.kind is TargetKind.LINEAR]
        self.matrices = [
            MatrixSize(target.name.rpartition(".")[2], target.outputs.full, target.inputs.full) for target in linears
        ]
        self.layers, self.hidden, self.vocab_size = model.num_layers, config.hidden_size, config.vocab_size
        self.max_length = find_max_length(model)
        self.weight_bytes = HALF_BYTES * weights.parameters
        self.token_bytes = block_bytes(model, 1)  # of the KV cache
        # Every decode step reads all weights but embeddings, norms and biases.
        self._linear = sum(matrix.outputs * matrix.inputs for matrix in self.matrices)
        self.read_bytes = HALF_BYTES * (self._linear + head.outputs.full * head.inputs.full)
        self._attention_width: int = config.num_attention_heads * model.kv_shape[1]

    def adapter_bytes(self, rank: int, modules: Collection[str], has_magnitudes: bool = False) -> int:
        """Return the device bytes of an adapter: A and B of each module, and DoRA's magnitudes."""
        chosen = [matrix for matrix in self.matrices if matrix.name in modules]
        tensors = [rank * size for matrix in chosen for size in (matrix.inputs, matrix.outputs)]
        tensors += [matrix.outputs for matrix in chosen if has_magnitudes]
        return sum(-(-HALF_BYTES * count // UNIT_BYTES) * UNIT_BYTES for count in tensors)

    def prompt_flop(self, length: int) -> float:
        """Return the floating-point operations per prompt token, for prompts of `length` tokens."""
        return 2 * self._linear + 2 * self.layers * self._attention_width * length


def read_sizes(path: Path) -> ModelSizes:
    """Return the sizes of the model in a folder, given by the folder or its config.json."""
    folder = path.parent if path.name == MODEL_CONFIG_FILE else path
    if not (folder / MODEL_CONFIG_FILE).is_file():
        raise ConfigError(
            f"--model {str(path)!r} is neither a model folder nor a config.json; `lorax download-weights` downloads a "
            "model from the hub and prints its folder"
        )
    return ModelSizes(load_config(ModelConfig(folder)))


def make_llama_sizes(fields: dict[str, Any]) -> ModelSizes:
    """Return the sizes of a Llama with some config fields."""
    with TemporaryDirectory() as folder:
        config = {"model_type": "llama", "max_position_embeddings": 2**31, **fields}
        Path(folder, MODEL_CONFIG_FILE).write_text(json.dumps(config))
        return ModelSizes(load_config(ModelConfig(Path(folder))))
