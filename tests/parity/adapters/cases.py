"""Adapters for comparison with PEFT: base model, adapter config and how PEFT saves it."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import (
    EvaConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
    initialize_lora_eva_weights,
)
from peft.tuners.lora.config import BdLoraConfig, CordaConfig, KasaConfig, MontecloraConfig, VeloraConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.utils.loftq_utils import _low_rank_decomposition
from safetensors.torch import load_file, save_file

from tests.lora import save_adapter
from tests.parity.other_variants import OTHER_VARIANTS
from tests.parity.variant import VOCAB
from tests.parity.variants import make_oracle

ATTENTION = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt2": ["c_attn", "attn.c_proj"],
    "neox": ["query_key_value", "attention.dense"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj"],
}
LATENT = ("deepseek2", "deepseek3", "glm4lite")
MIXTURES = ("mixtral", "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "glm4moe", "gptoss", *LATENT)
LLAMAS: tuple[str, ...] = (
    "gemma",
    "gemma2",
    "gemma3",
    "granite",
    "smollm3",
    "olmo2",
    "exaone4",
    "stablelm",
    "starcoder2",
    "cohere",
)
LLAMAS += ("cohere2", "nemotron", "arcee", "glm", "glm4", *MIXTURES)
ATTENTION |= dict.fromkeys(("mistral", "qwen2", "qwen3", *LLAMAS), ATTENTION["llama"])
ATTENTION |= {
    "phi": ["q_proj", "k_proj", "v_proj", "dense"],
    "phi3": ["qkv_proj", "o_proj"],
    "falcon": ["query_key_value", "self_attention.dense"],
    "bloom": ["query_key_value", "self_attention.dense"],
    "mpt": ["Wqkv", "out_proj"],
    "bigcode": ["c_attn", "attn.c_proj"],
    "gptj": ["q_proj", "k_proj", "v_proj", "out_proj"],
}
ATTENTION |= {base: ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"] for base in LATENT}
PEFT_FORMAT = "as-peft-writes-it"
EMBEDDING = {
    "gpt2": "wte",
    "gptj": "wte",
    "mpt": "wte",
    "falcon": "word_embeddings",
    "bloom": "word_embeddings",
    "neox": "embed_in",
    "opt": "embed_tokens",
}


@dataclass(frozen=True)
class Case:
    kind: str
    base: str
    settings: dict[str, Any] = field(default_factory=dict)
    vocab: int = VOCAB
    spread: float = 0.3
    """Of the base model's weights."""
    make: Callable[[Any, "Case", Path], None] | None = None
    """How PEFT writes it, where that is more than training and saving."""
    method: Any = LoraConfig
    """The config of PEFT's method."""

    @property
    def config(self) -> Any:
        if self.method is not LoraConfig:
            return self.method(**{"task_type": "CAUSAL_LM"} | self.settings)
        family = self.base.split("-", maxsplit=1)[0]
        settings: dict[str, Any]
        settings = {"r": 8, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": ATTENTION[family]}
        return LoraConfig(**settings | {"fan_in_fan_out": family == "gpt2"} | self.settings)

    def base_model(self) -> Any:
        """Return the base model as PEFT needs it, with as many tokens as the adapter was trained with."""
        model = make_oracle(self.base, self.spread)
        if self.vocab != VOCAB:
            torch.manual_seed(5)
            model.resize_token_embeddings(self.vocab, mean_resizing=False)
        return model

    def write(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT logs warnings here
            (self.make or train_and_save)(self.base_model(), self, folder)

    def oracle(self, folder: Path) -> Any:
        """Return a fresh base model with the adapter as PEFT loads it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = folder / PEFT_FORMAT
            return PeftModel.from_pretrained(self.base_model(), own if own.is_dir() else folder).eval().get_base_model()


def train_and_save(model: Any, case: Case, folder: Path) -> None:
    peft_model = get_peft_model(model, case.config)
    randomize(peft_model)
    # Save embeddings explicitly: offline, PEFT cannot detect a changed vocabulary.
    save_adapter(peft_model, folder, save_embedding_layers=True if case.vocab != VOCAB else "auto")


@torch.no_grad()
def randomize(model: Any) -> None:
    """Set all adapter parameters to random non-zero values."""
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_magnitude_vector" in name:
            parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
        elif "lora_" in name:
            parameter.normal_(0, 0.3 if min(parameter.shape) < 32 else 0.05)
        elif parameter.requires_grad or "modules_to_save" in name or "trainable_tokens" in name:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        elif name.endswith(("embed_tokens.weight", "embed_tokens.base_layer.weight")) and len(parameter) != VOCAB:
            parameter[min(VOCAB, len(parameter)) :].normal_(0, 0.3)


def save_converted(model: Any, case: Case, folder: Path) -> None:
    """Save PiSSA and similar methods, which change the base model, converted by PEFT for the unchanged base model."""
    config = case.config
    if config.loftq_config:
        config.init_lora_weights = "loftq"  # if set earlier, PEFT requires scipy without using it
    if config.init_lora_weights == "corda":
        run = lambda: model(torch.arange(3, 90)[None])  # noqa: E731
        preprocess_corda(model, config, run_model=run, hooked_model=None)
    peft_model = get_peft_model(model, config)
    trained: Any = peft_model.peft_config["default"]
    trained.init_lora_weights = True
    save_adapter(peft_model, folder / "initial")
    add_noise(peft_model)
    save_adapter(peft_model, folder, path_initial_model_for_weight_conversion=str(folder / "initial"))


def save_loftq(model: Any, case: Case, folder: Path) -> None:
    """Save LoftQ. Coarse rounding replaces bitsandbytes quantization, which needs a GPU."""

    def quantize(weight: torch.Tensor, num_bits: int, reduced_rank: int, num_iter: int) -> tuple[torch.Tensor, ...]:
        step = weight.abs().max() / 2 ** (num_bits - 1)
        rounded = (weight / step).round() * step
        factors = _low_rank_decomposition(weight - rounded, reduced_rank=reduced_rank)
        return rounded, factors["R"], factors["L"]

    with mock.patch("peft.tuners.lora.layer.loftq_init", quantize):
        save_converted(model, case, folder)


def save_renamed(rename: Callable[[str], str], model: Any, case: Case, folder: Path) -> None:
    """Save tensors with the names of other versions and tools. The oracle loads PEFT's names."""
    train_and_save(model, case, folder / PEFT_FORMAT)
    tensors = load_file(folder / PEFT_FORMAT / "adapter_model.safetensors")
    save_file({rename(key): tensor for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = json.loads((folder / PEFT_FORMAT / "adapter_config.json").read_text())
    for patterns in ("alpha_pattern", "rank_pattern"):  # older versions use different module names
        config[patterns] = {rename(f".{name}.")[1:-1]: value for name, value in config[patterns].items()}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@torch.no_grad()
def add_noise(model: Any) -> None:
    torch.manual_seed(8)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn_like(parameter) * 0.05)


def save_per_expert(model: Any, case: Case, folder: Path) -> None:
    """Save tensors as PEFT wrote them with transformers 4, where each expert had modules. PEFT converts them."""
    torch.manual_seed(7)
    config, name = model.config, "mlp"
    gate, up, down, router = "gate_proj", "up_proj", "down_proj", "gate"
    inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
    if config.model_type == "mixtral":
        gate, up, down, name = "w1", "w3", "w2", "block_sparse_moe"
    hidden, rank = config.hidden_size, case.config.r
    sizes = {gate: (hidden, inner), up: (hidden, inner), down: (inner, hidden)}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"base_model.model.model.layers.{layer}.{name}"
        modules = {f"{prefix}.{router}": (hidden, config.num_local_experts)}
        for expert in range(config.num_local_experts):
            modules |= {f"{prefix}.experts.{expert}.{matrix}": size for matrix, size in sizes.items()}
        for module, (inputs, outputs) in modules.items():
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = case.config.to_dict() | {"target_modules": [gate, up, down, router], "inference_mode": True}
    plain = {key: value for key, value in settings.items() if isinstance(value, str | int | float | list | type(None))}
    (folder / "adapter_config.json").write_text(json.dumps(plain))


def save_eva(model: Any, case: Case, folder: Path) -> None:
    """Save an EVA adapter with a different rank per module."""
    peft_model = get_peft_model(model, case.config)
    batches = [{"input_ids": torch.randint(3, VOCAB, (4, 16))} for _ in range(4)]
    initialize_lora_eva_weights(peft_model, batches, show_progress_bar=False)
    randomize(peft_model)
    save_adapter(peft_model, folder)


def target_modules(family: str, *names: str) -> dict[str, Any]:
    return {"target_modules": list(names) or ATTENTION[family]}


LAYER_1_V = r".*\.1\..*(v_proj|c_attn|query_key_value)"
CASES = {
    # All adapter kinds on Llama.
    "plain": Case("LoRA", "llama-gqa"),
    "rslora": Case("rsLoRA", "llama-gqa", {"use_rslora": True, "lora_alpha": 3}),
    "rank-pattern": Case(
        "rank_pattern", "llama-gqa", {"rank_pattern": {"q_proj": 3, r"layers\.1\.self_attn\.v_proj": 20}}
    ),
    "alpha-pattern": Case(
        "alpha_pattern", "llama-gqa", {"alpha_pattern": {"^model.layers.0.self_attn.k_proj": 50, "v_proj": 1}}
    ),
    "both-patterns-rslora": Case(
        "rank_pattern, alpha_pattern and rsLoRA together",
        "llama-gqa",
        {
            "rank_pattern": {"[qk]_proj": 5},
            "alpha_pattern": {"layers.2.*q_proj": 1},
            "use_rslora": True,
            "lora_alpha": 3,
        },
    ),
    "layers-to-transform": Case("layers_to_transform", "llama-gqa", {"layers_to_transform": [0, 2]}),
    "layers-pattern": Case("layers_pattern", "llama-gqa", {"layers_to_transform": 1, "layers_pattern": "layers"}),
    "all-linear": Case("target_modules = all-linear", "llama-gqa", {"target_modules": "all-linear"}),
    "regex": Case("target_modules as a regex", "llama-gqa", {"target_modules": r".*layers\.[02]\..*(gate|up)_proj"}),
    "exclude": Case("exclude_modules", "llama-gqa", {"exclude_modules": r".*layers\.1\..*"}),
    "one-module": Case("one module of one layer", "llama-gqa", {"target_modules": LAYER_1_V}),
    "lm-head": Case("LoRA on the head", "llama-gqa", target_modules("llama", "q_proj", "lm_head")),
    "embedding": Case("LoRA on the embedding", "llama-gqa", target_modules("llama", "v_proj", "embed_tokens")),
    "embedding-and-head": Case(
        "LoRA on embedding and head", "llama-gqa", target_modules("llama", "embed_tokens", "lm_head")
    ),
    "tied-head-only": Case(
        "LoRA on the head of a tied model", "llama-tied-head", target_modules("llama", "lm_head", "q_proj")
    ),
    "tied-embedding-only": Case(
        "LoRA on the embedding of a tied model", "llama-tied-head", target_modules("llama", "embed_tokens")
    ),
    "weight-tying": Case(
        "ensure_weight_tying",
        "llama-tied-head",
        target_modules("llama", "embed_tokens", "v_proj") | {"ensure_weight_tying": True},
    ),
    "saved-head": Case("modules_to_save: head", "llama-gqa", {"modules_to_save": ["lm_head"]}),
    "saved-embedding": Case("modules_to_save: embedding", "llama-gqa", {"modules_to_save": ["embed_tokens"]}),
    "saved-both": Case("modules_to_save: both", "llama-gqa", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved-tied-head": Case(
        "modules_to_save: head of a tied model", "llama-tied-head", {"modules_to_save": ["lm_head"]}
    ),
    "saved-tied-embedding": Case(
        "modules_to_save: embedding of a tied model", "llama-tied-head", {"modules_to_save": ["embed_tokens"]}
    ),
    "saved-weight-tying": Case(
        "modules_to_save with ensure_weight_tying",
        "llama-tied-head",
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "saved-norms": Case("modules_to_save: norms", "llama-gqa", {"modules_to_save": ["input_layernorm", "model.norm"]}),
    "tokens": Case("trainable_token_indices", "llama-gqa", {"trainable_token_indices": [5, 90, 17]}),
    "tokens-of-both": Case(
        "trainable_token_indices by module",
        "llama-gqa",
        {"trainable_token_indices": {"embed_tokens": [5, 17], "lm_head": [6, 90, 5]}},
    ),
    "tokens-tied": Case(
        "trainable_token_indices of a tied model", "llama-tied-head", {"trainable_token_indices": [8, 3]}
    ),
    "added-tokens": Case("added tokens", "llama-gqa", vocab=VOCAB + 5),
    "added-tokens-tied": Case("added tokens of a tied model", "llama-tied-head", vocab=VOCAB + 3),
    "added-tokens-lora": Case(
        "added tokens with LoRA on embedding and head",
        "llama-gqa",
        target_modules("llama", "embed_tokens", "lm_head", "q_proj"),
        vocab=VOCAB + 4,
    ),
    "added-tokens-dora": Case(
        "added tokens with DoRA on embedding and head",
        "llama-gqa",
        target_modules("llama", "embed_tokens", "lm_head") | {"use_dora": True},
        vocab=VOCAB + 4,
    ),
    "added-tokens-saved": Case(
        "added tokens with modules_to_save",
        "llama-gqa",
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        vocab=VOCAB + 2,
    ),
    "added-tokens-trained": Case(
        "added tokens with trainable_token_indices",
        "llama-tied-head",
        {"trainable_token_indices": [VOCAB, VOCAB + 1, 4]},
        vocab=VOCAB + 2,
    ),
    "fewer-tokens": Case("a smaller vocabulary", "llama-gqa", vocab=VOCAB - 6),
    "fewer-tokens-embedding": Case(
        "a smaller vocabulary with LoRA on the embedding alone",
        "llama-gqa",
        target_modules("llama", "embed_tokens"),
        vocab=VOCAB - 6,
    ),
    "fewer-tokens-lora": Case(
        "a smaller vocabulary with LoRA on embedding and head",
        "llama-gqa",
        target_modules("llama", "embed_tokens", "lm_head"),
        vocab=VOCAB - 6,
    ),
    "lora-bias": Case("lora_bias", "llama-attention-bias", {"lora_bias": True}),
    "lora-bias-without-base-bias": Case("lora_bias where the base has no bias", "llama-gqa", {"lora_bias": True}),
    "bias-all": Case("bias = all", "llama-attention-bias", {"bias": "all"}),
    "bias-lora-only": Case(
        "bias = lora_only", "llama-attention-bias", target_modules("llama", "q_proj") | {"bias": "lora_only"}
    ),
    "dora": Case("DoRA", "llama-gqa", {"use_dora": True}),
    "dora-biased-base": Case("DoRA on biased layers", "llama-attention-bias", {"use_dora": True}),
    "dora-bias-all": Case("DoRA with bias = all", "llama-attention-bias", {"use_dora": True, "bias": "all"}),
    "dora-rslora-patterns": Case(
        "DoRA with rsLoRA and rank_pattern",
        "llama-gqa",
        {"use_dora": True, "use_rslora": True, "rank_pattern": {"v_proj": 2}, "target_modules": "all-linear"},
    ),
    "dora-embedding": Case(
        "DoRA on the embedding", "llama-gqa", target_modules("llama", "embed_tokens") | {"use_dora": True}
    ),
    "dora-head": Case(
        "DoRA on the head", "llama-gqa", target_modules("llama", "lm_head", "up_proj") | {"use_dora": True}
    ),
    "gaussian": Case("init gaussian", "llama-gqa", {"init_lora_weights": "gaussian"}),
    "orthogonal": Case("init orthogonal", "llama-gqa", {"init_lora_weights": "orthogonal"}),
    "random-init": Case("init random", "llama-gqa", {"init_lora_weights": False}),
    "mica": Case("init MiCA", "llama-gqa", {"init_lora_weights": "mica"}),
    "eva": Case(
        "init EVA with a rank for each module",
        "llama-gqa",
        {"init_lora_weights": "eva", "eva_config": EvaConfig(rho=2.0)},
        make=save_eva,
    ),
    "pissa-converted": Case("PiSSA, converted", "llama-gqa", {"init_lora_weights": "pissa"}, make=save_converted),
    "pissa-fast-converted": Case(
        "PiSSA by fast SVD, converted", "llama-gqa", {"init_lora_weights": "pissa_niter_4"}, make=save_converted
    ),
    "olora-converted": Case("OLoRA, converted", "llama-gqa", {"init_lora_weights": "olora"}, make=save_converted),
    "corda-converted": Case(
        "CorDA, converted",
        "llama-gqa",
        {"init_lora_weights": "corda", "corda_config": CordaConfig(corda_method="ipm")},
        make=save_converted,
    ),
    "loftq-converted": Case(
        "LoftQ, converted",
        "llama-gqa",
        {"loftq_config": {"loftq_bits": 4, "loftq_iter": 1}},
        make=save_loftq,
    ),
    "velora": Case("VeLoRA", "llama-gqa", {"velora_config": VeloraConfig(num_groups=4)}),
    "monteclora": Case("MonteCLoRA", "llama-gqa", {"monteclora_config": MontecloraConfig(num_samples=4)}),
    "bd-lora": Case(
        "BD-LoRA",
        "llama-mha",
        {
            "use_bdlora": BdLoraConfig(
                target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj", "k_proj", "v_proj"], nblocks=2
            )
        },
    ),
    "everything": Case(
        "several features combined",
        "llama-attention-bias",
        {
            "target_modules": "all-linear",
            "use_dora": True,
            "use_rslora": True,
            "lora_alpha": 2,
            "rank_pattern": {r"layers\.2\.mlp\.down_proj": 31},
            "alpha_pattern": {"o_proj": 2},
            "bias": "all",
            "modules_to_save": ["lm_head", "embed_tokens", "model.norm"],
        },
        vocab=VOCAB + 3,
    ),
    # Ranks that are not multiples of any tile size, and large ranks.
    **{f"rank-{rank}": Case("LoRA", "llama-gqa", {"r": rank, "lora_alpha": 3}) for rank in (1, 7, 33, 128, 512)},
}
# The other architectures, each with the special cases of its matrices.
for family, base, saved in (
    ("mistral", "mistral-window", "lm_head"),
    ("qwen2", "qwen2-bias", "lm_head"),
    ("qwen3", "qwen3-head-norm", "lm_head"),
    ("gpt2", "gpt2", "lm_head"),
    ("neox", "neox-parallel", "lm_head"),
    ("opt", "opt-pre-norm", "lm_head"),
):
    embedding = EMBEDDING.get(family, "embed_tokens")
    CASES |= {
        f"{family}-all-linear": Case("LoRA", base, {"target_modules": "all-linear"}),
        f"{family}-dora": Case("DoRA", base, {"target_modules": "all-linear", "use_dora": True}),
        f"{family}-bias-all": Case("bias = all", base, {"bias": "all"}),
        f"{family}-one-module": Case("one module of one layer", base, {"target_modules": LAYER_1_V}),
        f"{family}-embedding-and-head": Case(
            "LoRA on embedding and head", base, {"target_modules": [embedding, "lm_head"], "use_rslora": True}
        ),
        f"{family}-saved": Case("modules_to_save: both", base, {"modules_to_save": [saved, embedding]}),
        f"{family}-tokens": Case("trainable_token_indices", base, {"trainable_token_indices": [9, 4]}),
        f"{family}-added-tokens": Case("added tokens", base, vocab=VOCAB + 3),
    }
NORMS = {
    "olmo2": "post_attention_layernorm",
    "exaone4": "post_feedforward_layernorm",
    "gptj": "ln_1",
    "mpt": "norm_1",
    "bigcode": "ln_2",
}
for base in OTHER_VARIANTS:
    if "-" in base:
        continue
    embedding, norm = EMBEDDING.get(base, "embed_tokens"), NORMS.get(base, "input_layernorm")
    has_dora = "all-linear" if base not in MIXTURES else ATTENTION[base]  # PEFT has no DoRA for experts
    CASES |= {
        f"{base}-all-linear": Case("LoRA", base, {"target_modules": "all-linear", "r": 3}),
        f"{base}-dora": Case("DoRA", base, {"target_modules": has_dora, "use_dora": True, "bias": "all"}),
        f"{base}-embedding-and-head": Case(
            "LoRA on embedding and head", base, {"target_modules": [embedding, "lm_head", ATTENTION[base][0]]}
        ),
        f"{base}-saved": Case("modules_to_save: both", base, {"modules_to_save": ["lm_head", embedding, norm]}),
        f"{base}-added-tokens": Case("added tokens", base, vocab=VOCAB + 3),
    }
CASES["opt-projection"] = Case("input and output projections (OPT)", "opt-projection", {"target_modules": "all-linear"})
CASES |= {
    "early-names": Case(
        "tensor names of early PEFT versions",
        "llama-attention-bias",
        {"use_dora": True, "bias": "lora_only", "modules_to_save": ["lm_head"]},
        make=partial(
            save_renamed,
            lambda key: (
                key.replace(".lora_A.", ".lora_A.default.")
                .replace(".lora_B.", ".lora_B.default.")
                .replace("_vector", "_vector.default")
                .replace("base_layer.bias", "bias")
                .replace("lm_head.weight", "lm_head.modules_to_save.default.weight")
            ),
        ),
    ),
    "wrapped-names": Case(
        "tensor names with wrapper prefixes (Ludwig)",
        "llama-gqa",
        target_modules("llama", "q_proj", "lm_head"),
        make=partial(save_renamed, lambda key: key.replace("base_model.model.", "base_model.model.base_model.model.")),
    ),
    "short-names": Case(
        "tensor names without leading components",
        "gpt2",
        make=partial(save_renamed, lambda key: key.removeprefix("base_model.model.transformer.")),
    ),
    "neox-embed-out": Case(
        "tensor names renamed in newer transformers",
        "neox-parallel",
        target_modules("neox", "query_key_value", "lm_head") | {"alpha_pattern": {"lm_head": 9}},
        make=partial(save_renamed, lambda key: key.replace(".lm_head.", ".embed_out.")),
    ),
}
CASES["gpt2-weight-tying"] = Case(
    "ensure_weight_tying", "gpt2", {"target_modules": ["wte", "c_attn"], "ensure_weight_tying": True}
)
CASES["gpt2-saved-norms-bias-all"] = Case(
    "modules_to_save: norms, with bias = all", "gpt2", {"modules_to_save": ["ln_1"], "bias": "all"}
)
CASES["gpt2-untied-saved"] = Case("modules_to_save: head", "gpt2-untied-head", {"modules_to_save": ["lm_head"]})
CASES["neox-saved-norms"] = Case("modules_to_save: norms", "neox-parallel", {"modules_to_save": ["final_layer_norm"]})
# PEFT's other methods, and `modules_to_save`.
KASA = {"kasa_config": KasaConfig(), "r": 4}
GATED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES |= {
    "kasa": Case("KaSA", "llama-gqa", KASA | {"rank_pattern": {"v_proj": 7}, "lora_bias": True}),
    "phi3-kasa": Case("KaSA", "phi3", KASA | {"target_modules": "all-linear"}),
    "ia3": Case("IA3", "llama-gqa", method=IA3Config),
    "ia3-biased": Case(
        "IA3",
        "llama-attention-bias",
        {"target_modules": GATED, "feedforward_modules": ["down_proj"], "modules_to_save": ["embed_tokens"]},
        method=IA3Config,
    ),
    "ia3-head": Case(
        "IA3 on the head",
        "llama-tied-head",
        {"target_modules": ["lm_head", "k_proj"], "feedforward_modules": []},
        method=IA3Config,
    ),
    "ia3-beside-a-saved-linear": Case(
        "IA3 with modules_to_save",
        "llama-attention-bias",
        {"target_modules": ["down_proj"], "feedforward_modules": ".*down_proj", "modules_to_save": ["up_proj"]},
        method=IA3Config,
    ),
    "phi3-ia3": Case(
        "IA3",
        "phi3",
        {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        method=IA3Config,
    ),
    **{f"{base}-ia3": Case("IA3", base, method=IA3Config) for base in ("gpt2", "falcon", "opt-pre-norm", "phi")},
    "vera": Case("VeRA", "llama-gqa", {"r": 6, "target_modules": GATED}, method=VeraConfig),
    "vera-head": Case(
        "VeRA on the head", "llama-gqa", {"r": 5, "target_modules": ["lm_head", "k_proj"]}, method=VeraConfig
    ),
    "vera-drawn": Case(
        "VeRA without its projections",
        "llama-attention-bias",
        {"r": 9, "target_modules": GATED, "save_projection": False, "projection_prng_key": 11, "bias": "all"},
        method=VeraConfig,
    ),
    "gpt2-vera": Case("VeRA", "gpt2", {"r": 4, "target_modules": ["c_attn", "mlp.c_proj"]}, method=VeraConfig),
    "falcon-vera": Case(
        "VeRA", "falcon", {"r": 4, "target_modules": ["query_key_value", "dense_4h_to_h"]}, method=VeraConfig
    ),
    **{
        f"{base}-ln-tuning": Case("LN tuning", base, method=LNTuningConfig)
        for base in ("llama-gqa", "gpt2", "falcon", "gemma2")
    },
    "ln-tuning-of-others": Case(
        "LN tuning of other modules",
        "llama-tied-head",
        {"target_modules": ["norm", "k_proj", "embed_tokens"], "modules_to_save": ["o_proj"]},
        method=LNTuningConfig,
    ),
    "saved-linears": Case(
        "modules_to_save: linears",
        "llama-attention-bias",
        target_modules("llama", "q_proj") | {"modules_to_save": ["v_proj", "o_proj"]},
    ),
    "saved-block": Case(
        "modules_to_save: linears", "llama-gqa", target_modules("llama", "q_proj") | {"modules_to_save": ["mlp"]}
    ),
    "gpt2-saved-linears": Case(
        "modules_to_save: linears",
        "gpt2",
        target_modules("gpt2", "c_attn") | {"modules_to_save": ["attn.c_proj", "c_fc"]},
    ),
    "phi3-saved-linears": Case(
        "modules_to_save: linears",
        "phi3",
        target_modules("phi3", "o_proj") | {"modules_to_save": ["qkv_proj", "gate_up_proj"]},
    ),
    "falcon-saved-linears": Case(
        "modules_to_save: linears", "falcon", {"modules_to_save": ["dense_4h_to_h"], "target_modules": ["dense"]}
    ),
    **{
        f"{base}-saved-head-norms": Case(
            "modules_to_save: norms of heads", base, {"modules_to_save": ["q_norm", "k_norm"]}
        )
        for base in ("qwen3-head-norm", "gemma3", "olmo2", "cohere-head-norm")
    },
    "phi-saved-head-norms": Case(
        "modules_to_save: norms of heads", "phi-head-norms", {"modules_to_save": ["q_layernorm", "k_layernorm"]}
    ),
    "exaone4-saved-attention": Case(
        "modules_to_save: norms of heads",
        "exaone4",
        target_modules("llama", "up_proj") | {"modules_to_save": ["self_attn"]},
    ),
    "weight-tying-rank-of-embedding": Case(
        "ensure_weight_tying with rank_pattern",
        "llama-tied-head",
        target_modules("llama", "embed_tokens", "v_proj")
        | {"ensure_weight_tying": True, "rank_pattern": {"embed_tokens": 5}},
    ),
    "weight-tying-rank-of-head": Case(
        "ensure_weight_tying with rank_pattern",
        "llama-tied-head",
        target_modules("llama", "lm_head", "embed_tokens")
        | {"ensure_weight_tying": True, "rank_pattern": {"lm_head": 5}},
    ),
}
# The projection from latents, which the server does not compute as a product with one matrix.
LATENT_LINEARS = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
CASES |= {
    "deepseek2-lite": Case("LoRA", "deepseek2-lite", {"target_modules": LATENT_LINEARS, "r": 5}),
    "deepseek2-kv-b": Case(
        "lora_bias where the base has no bias", "deepseek2", {"target_modules": ["kv_b_proj"], "lora_bias": True}
    ),
    "deepseek2-kasa": Case("KaSA", "deepseek2", KASA | {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa"]}),
    "deepseek2-ia3": Case(
        "IA3", "deepseek2", {"target_modules": ["kv_b_proj", "q_b_proj"], "feedforward_modules": []}, method=IA3Config
    ),
    "deepseek2-vera": Case("VeRA", "deepseek2", {"r": 4, "target_modules": ["kv_b_proj"]}, method=VeraConfig),
    "deepseek2-saved-linears": Case(
        "modules_to_save: linears",
        "deepseek2-biases",
        {"target_modules": ["q_a_proj"], "modules_to_save": ["kv_a_proj_with_mqa", "kv_b_proj"]},
    ),
    "deepseek2-saved-latent-norms": Case(
        "modules_to_save: norms",
        "deepseek2",
        {"target_modules": ["o_proj"], "modules_to_save": ["q_a_layernorm", "kv_a_layernorm"]},
    ),
}
# Experts, in all forms that PEFT writes.
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATTERNS = {"experts.down_proj": 5, r"layers\.1\.mlp\.experts\.gate_up_proj": 2}
CASES |= {
    "experts": Case("LoRA on experts", "qwen3moe", {"target_parameters": BOTH, "r": 3}),
    "experts-alone": Case(
        "LoRA on experts", "qwen3moe", {"target_parameters": ["experts.gate_up_proj"], "target_modules": []}
    ),
    "experts-down-rslora": Case(
        "LoRA on experts with rsLoRA", "mixtral", {"target_parameters": BOTH[1:], "use_rslora": True, "r": 4}
    ),
    "experts-patterns": Case(
        "LoRA on experts with rank_pattern and alpha_pattern",
        "mixtral",
        {"target_parameters": BOTH, "rank_pattern": PATTERNS, "alpha_pattern": {"gate_up_proj": 9}, "r": 4},
    ),
    "experts-in-some-layers": Case("LoRA on experts", "qwen3moe-dense-layers", {"target_parameters": BOTH, "r": 2}),
    "experts-router": Case("LoRA on the router", "qwen3moe", {"target_parameters": ["mlp.gate.weight"]}),
    "experts-saved-router": Case("modules_to_save: router", "qwen3moe", {"modules_to_save": ["gate"]}),
    "experts-gptoss": Case(
        "LoRA on experts", "gptoss", {"target_parameters": BOTH, "r": 3, "rank_pattern": {"down_proj": 5}}
    ),
    **{
        f"experts-{base}-per-expert": Case("LoRA on modules of each expert", base, {"r": 3}, make=save_per_expert)
        for base in ("mixtral", "qwen3moe")
    },
    **{f"experts-{base}": Case("LoRA on experts", base, {"target_parameters": BOTH, "r": 3}) for base in LATENT[:2]},
}
