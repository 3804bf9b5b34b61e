"""Measures model sizes by building the served model on torch's meta device, without loading weights."""

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
from lorax_server.models.registry import build_model, check_quantize, find_quantization, load_config
from lorax_server.quantization_config import LOADED_BYTES
from lorax_server.weights import LINEAR_BITS, QUANTIZATION_BLOCK_SIZE, Weights
from lorax_server.worker.memory import block_bytes
from lorax_server.worker.model_info import find_max_length

MAX_LAYERS = 1000  # no real model has more layers, and building one would take minutes
HALF_PRECISION_BYTES = 2  # per bfloat16 or float16 value


class MatrixSize(NamedTuple):
    """Dimensions of one linear layer, or of one matrix in all experts of a layer. `name` is the target module name."""

    name: str
    outputs: int
    inputs: int
    num_experts: int = 1
    top_k: int = 1  # experts per token

    @property
    def num_elements(self) -> int:
        return self.num_experts * self.outputs * self.inputs

    def fraction_read(self, batch_size: float) -> float:
        """Return the share of the matrices that a step with `batch_size` tokens reads, if routing is balanced."""
        return 1 - math.pow(1 - self.top_k / self.num_experts, batch_size)


class MetaWeights(Weights):
    """Replacement for model weights that returns meta tensors and counts the parameters."""

    def __init__(self) -> None:
        device, group = torch.device("meta"), FakeGroup()
        super().__init__({}, device=device, dtype=torch.bfloat16, process_group=group, ops=reference)
        self.parameters = 0
        # In matrices that can be quantized.
        self.linear_parameters = 0
        self.vocabulary_parameters = 0

    def has(self, name: str) -> bool:  # noqa: ARG002 - optional tensors, such as a tied output head, are absent
        return False

    def get_tensor(
        self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        assert shape is not None, name
        self.parameters += math.prod(shape)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def get_expert(self, name: str, expert: int, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ARG002
        return self.get_tensor(name, shape)

    def get_sharded(self, name: str, dim: int, shard: Shard, shape: tuple[int, ...] | None = None) -> torch.Tensor:  # noqa: ARG002
        return self.get_tensor(name, shape)

    def get_matrix(
        self,
        name: str,
        outputs: Shard,
        inputs: Shard,
        *,
        fan_in_fan_out: bool = False,  # noqa: ARG002
        min_bits: int = 4,
        can_reorder: bool = False,  # noqa: ARG002
    ) -> torch.Tensor:
        if inputs.full % QUANTIZATION_BLOCK_SIZE == 0 and min_bits <= LINEAR_BITS:
            self.linear_parameters += outputs.full * inputs.full
        elif inputs.full % QUANTIZATION_BLOCK_SIZE == 0:
            self.vocabulary_parameters += outputs.full * inputs.full
        return self.get_tensor(name, (outputs.full, inputs.full))


class ModelSizes:
    """Sizes of model weights, KV cache and adapters. Weights that are not quantized have half precision."""

    def __init__(self, config: Any, loaded_format: str | None = None) -> None:
        """Build the model on the meta device and measure it.

        `loaded_format` is the format that 16-bit weights are converted to while loading, a key of `LOADED_BYTES`.
        """
        quantization = find_quantization(config)
        self.is_quantized = quantization is not None or loaded_format is not None
        self._linear_bytes: float = HALF_PRECISION_BYTES
        self._vocabulary_bytes: float = HALF_PRECISION_BYTES  # per weight of embeddings and LM heads
        if quantization is not None:
            self._linear_bytes = quantization.bytes_per_weight
        elif loaded_format is not None:
            self._linear_bytes = LOADED_BYTES[loaded_format]
            if loaded_format in ("int8", "int4"):
                self._vocabulary_bytes = LOADED_BYTES["int8"]
        if config.num_hidden_layers > MAX_LAYERS:
            raise ConfigError(f"config field num_hidden_layers must be at most {MAX_LAYERS}")
        weights = MetaWeights()
        try:
            model = build_model(config, weights)
        except (RuntimeError, TypeError, OverflowError) as error:  # raised by torch for sizes above 64 bits
            raise ConfigError(f"the config's sizes are too large: {str(error).splitlines()[0]}") from error
        head = model.lm_head.targets[0]
        self.matrices = []
        for target in collect_adapter_targets(model).values():
            if target.kind in (TargetKind.LINEAR, TargetKind.EXPERTS):
                counts = (1, 1) if target.experts is None else (target.experts.num_experts, target.experts.top_k)
                name = target.name.rpartition(".")[2]
                self.matrices.append(MatrixSize(name, target.outputs.full, target.inputs.full, *counts))
        self.layers, self.hidden_size, self.vocab_size = model.num_layers, config.hidden_size, config.vocab_size
        self.max_length = find_max_length(model)
        other_parameters = weights.parameters - weights.linear_parameters - weights.vocabulary_parameters
        self.weight_bytes = int(
            HALF_PRECISION_BYTES * other_parameters
            + self._linear_bytes * weights.linear_parameters
            + self._vocabulary_bytes * weights.vocabulary_parameters
        )
        self.token_bytes = block_bytes(model, 1)  # KV cache bytes per token
        self._head = head.outputs.full * head.inputs.full
        self._attention_width: int = config.num_attention_heads * model.kv_shape[1]

    def adapter_bytes(self, rank: int, modules: Collection[str], has_magnitudes: bool = False) -> int:
        """Return the adapter size on the device: A and B for each module, and DoRA magnitudes."""
        chosen = [matrix for matrix in self.matrices if matrix.name in modules]
        tensors = [m.num_experts * rank * size for m in chosen for size in (m.inputs, m.outputs)]
        tensors += [matrix.outputs for matrix in chosen if has_magnitudes]
        return sum(-(-HALF_PRECISION_BYTES * count // UNIT_BYTES) * UNIT_BYTES for count in tensors)

    def count_bytes_read(self, batch_size: float) -> float:
        """Return the bytes of weights that a decode step reads.

        These are all linear layers, the experts of the batch's tokens, and the output head. Embeddings, norms and
        biases are negligible.
        """
        linear = sum(matrix.num_elements * matrix.fraction_read(batch_size) for matrix in self.matrices)
        return self._linear_bytes * linear + self._vocabulary_bytes * self._head

    def prompt_flops(self, length: int) -> float:
        """Return FLOPs per prompt token for prompts with `length` tokens."""
        linear = sum(matrix.num_elements * matrix.top_k // matrix.num_experts for matrix in self.matrices)
        return 2 * linear + 2 * self.layers * self._attention_width * length


def read_sizes(path: Path, quantize: str | None = None) -> ModelSizes:
    """Return the sizes of a model, given its folder or its config.json. `quantize` is the server's setting."""
    folder = path.parent if path.name == MODEL_CONFIG_FILE else path
    if not (folder / MODEL_CONFIG_FILE).is_file():
        raise ConfigError(
            f"--model {str(path)!r} is not a model folder or config.json; `lorax download` downloads a model "
            "from the hub and prints its folder"
        )
    settings = ModelConfig(folder, quantize=quantize)
    config = load_config(ModelConfig(folder))  # without fp8-kv, so that the KV cache is measured in half precision
    check_quantize(settings, config, find_quantization(config))
    return ModelSizes(config, settings.loaded_format)


def make_llama_sizes(fields: dict[str, Any], quantize: str | None = None) -> ModelSizes:
    """Return the sizes of a Llama model with these config fields."""
    with TemporaryDirectory() as folder:
        config = {"model_type": "llama", "max_position_embeddings": 2**31, **fields}
        Path(folder, MODEL_CONFIG_FILE).write_text(json.dumps(config))
        return read_sizes(Path(folder), quantize)
