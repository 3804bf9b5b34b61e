"""Valid and hostile `adapter_config.json` files. PEFT is the reference."""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, VeraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from transformers import AutoModelForCausalLM

from lorax_server.adapters import patterns
from lorax_server.adapters.config import AdapterConfig, check_base_model, parse_config
from lorax_server.adapters.methods.fields import (
    FIELDS_BY_METHOD,
    MAX_INVOCATION_TOKENS,
    MAX_PATTERNS,
    NOT_WITH_INVOCATION,
    ConfigReader,
    Method,
)
from lorax_server.errors import AdapterError
from tests.parity.variants import VARIANTS

BASE = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 12, "target_modules": ["q_proj"]}
Q_PROJ = "model.layers.1.self_attn.q_proj"
NAN, INF = math.nan, math.inf
LORA = FIELDS_BY_METHOD[Method.LORA]
SERVED_FIELDS, TRAINING_FIELDS, REFUSED_FIELDS = LORA.supported, LORA.training_only, LORA.unsupported


def parse(**changes: Any) -> AdapterConfig:
    return parse_config(BASE | changes, "acme/tuned")


@cache
def module_names() -> tuple[str, ...]:
    """Return the module names of four architectures, and some invalid names."""
    names = {"", "q_proj", "layers.0", "experts.layers.1.experts.0.q_proj", "0.1.2.q_proj"}
    for variant in ("llama-gqa", "gpt2", "opt-pre-norm", "neox-parallel"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(VARIANTS[variant].config())
        names |= {name for name, _ in model.named_modules()}
    return tuple(sorted(names))


# --- ranks and scales


@pytest.mark.parametrize(
    ("changes", "rank", "scale"),
    [
        ({}, 8, 1.5),
        ({"r": 65536}, 65536, 12 / 65536),
        ({"lora_alpha": 0}, 8, 0.0),
        ({"lora_alpha": -4.5}, 8, -4.5 / 8),
        ({"use_rslora": True}, 8, 12 / math.sqrt(8)),
        ({"use_rslora": True, "rank_pattern": {"q_proj": 2}}, 2, 12 / math.sqrt(2)),
        ({"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 6}}, 3, 2.0),
        ({"rank_pattern": {"k_proj": 3}, "alpha_pattern": None, "use_rslora": None}, 8, 1.5),
    ],
)
def test_rank_and_scale_follow_config(changes: dict[str, Any], rank: int, scale: float) -> None:
    config = parse(**changes)
    assert config.rank(Q_PROJ) == rank
    assert config.scale(Q_PROJ) == scale


PATTERNS = [
    *("q_proj", "self_attn.q_proj", "^q_proj", f"^{Q_PROJ}", Q_PROJ, "model.layers.1", r"layers\.1\..*", "layers.1.*"),
    *(r"layers.[02].mlp.down_proj", r"h\.\d+\.attn\.c_attn", "proj", ".*", "", ".", "q_proj|fc1", "(q|k)_proj$"),
    *("decoder.*[qv]_proj", "attn.c_attn$", "dense", r".*\.dense", "a)|(fc2", r"\Aquery", "_proj", r"(?=lm)lm_head"),
]


def test_first_matching_pattern_is_used_as_in_peft() -> None:
    """Check that the first match is used, for single patterns and for all pairs of patterns."""
    seen = set()
    for keys in [*itertools.permutations(PATTERNS, 2), *itertools.permutations(PATTERNS[:4], 4)]:
        pattern = {key: number for number, key in enumerate(keys, start=20)}
        config = parse(rank_pattern=pattern, alpha_pattern=pattern, lora_alpha=8)
        for name in module_names()[::3]:
            expected = pattern.get(get_pattern_key(list(pattern), name), 8)
            assert config.rank(name) == expected, (keys, name)
            assert config.scale(name) == 1.0
            seen.add(expected)
    assert {8, 20, 21, 22} <= seen


# --- targets

TARGETS = [
    ["q_proj", "c_attn", "dense"],
    [Q_PROJ, "transformer.h.0.attn.c_proj", "fc1"],
    ["self_attn.v_proj", "mlp.c_proj", "lm_head", "embed_tokens", "wte", "query_key_value", "0"],
    *(r".*\.(q|k)_proj", r"model\.layers\.[01]\..*", "lm_head|.*wte", ".*", "q_proj", r"(?i).*Q_PROJ", ""),
]
EXCLUDED = [None, ["q_proj", "transformer.h.1.attn.c_attn"], r".*\.1\..*|lm_head", ""]
LAYERS = [None, 0, [], [1, 7]]
LAYERS_PATTERNS = [None, "", "layers", ["h", "layers"], ["nothing"], [r"(?:model|decoder)\.layers", "h"]]
SAVED = [None, ["lm_head", "self_attn"], [r"layers\.1", "h.1"]]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_target_modules_match_peft(targets: Any) -> None:
    answers = set()
    for excluded, layers, pattern, saved in itertools.product(EXCLUDED, LAYERS, LAYERS_PATTERNS, SAVED):
        fields = {
            "target_modules": targets,
            "exclude_modules": excluded,
            "layers_to_transform": layers,
            "layers_pattern": pattern,
            "modules_to_save": saved,
        }
        try:
            oracle = LoraConfig(**fields)
        except ValueError:
            continue  # combinations that PEFT cannot save
        config = parse(**fields)
        for name in module_names():
            expected = bool(check_target_module_exists(oracle, name))
            assert config.is_target(name) is expected, (fields, name)
            answers.add(expected)
    assert answers == {False, True}


@pytest.mark.parametrize("targets", [None, "all-linear", "ALL-Linear"])
def test_model_dependent_targets_are_unknown(targets: str | None) -> None:
    assert parse(target_modules=targets).is_target(Q_PROJ) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r"(?:model|lm_head)\..*|nothing"},
        {"target_modules": "(?x) .* q_proj # comment"},
        {"layers_to_transform": [1], "layers_pattern": ["model|h"]},  # matches without a layer index
    ],
)
def test_pattern_matching_agrees_with_peft(changes: dict[str, Any]) -> None:
    fields = {"target_modules": ["q_proj"]} | changes
    assert parse(**fields).is_target(Q_PROJ) is bool(check_target_module_exists(LoraConfig(**fields), Q_PROJ))


# --- hostile patterns

SLOW_PATTERN = r"(?:\w|\.|\w\.|\w\w)*[!?]"
PATTERN_FIELDS: dict[str, Callable[[str], Any]] = {
    "target_modules": lambda pattern: pattern,
    "exclude_modules": lambda pattern: pattern,
    "modules_to_save": lambda pattern: [pattern],
    "rank_pattern": lambda pattern: {pattern: 1},
    "alpha_pattern": lambda pattern: {pattern: 1},
    "layers_pattern": lambda pattern: [pattern],
}


def use_pattern(field: str, pattern: str) -> None:
    config = parse(**{"layers_to_transform": [1], field: PATTERN_FIELDS[field](pattern)})
    config.is_target(Q_PROJ)
    config.scale(Q_PROJ)


@pytest.mark.parametrize("field", PATTERN_FIELDS)
@pytest.mark.parametrize(
    "pattern",
    [
        *(
            SLOW_PATTERN,
            "(?R)",
            "[",
            "(",
            r"\L<x>",
            r"\p{zzz}",
            "x{99999999999999}",
            "(?P<",
            "(?P=x)",
            "[z-a]",
            r"\N{x}",
        ),
        *("(" * 3000 + ")" * 3000, "(?V0)(?V1)x", ".*q_proj{e}"),
    ],
    ids=lambda pattern: pattern[:30],
)
def test_invalid_pattern_is_rejected(field: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_BUDGET_S", 0.01)
    with pytest.raises(AdapterError, match=r"adapter 'acme/tuned': pattern '"):
        use_pattern(field, pattern)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_pattern_with_unbalanced_parentheses_is_rejected(field: str) -> None:
    with pytest.raises(AdapterError, match=r"adapter 'acme/tuned': pattern 'model\)"):
        use_pattern(field, "model)|(?:x")


# --- fields


CONFIGS: dict[Any, Method] = {
    LoraConfig: Method.LORA,
    IA3Config: Method.IA3,
    VeraConfig: Method.VERA,
    LNTuningConfig: Method.LN_TUNING,
}


def test_every_peft_field_is_classified() -> None:
    """If this fails with a new PEFT version, classify the new fields in `fields.py`."""
    for kind, method in CONFIGS.items():
        known, names = FIELDS_BY_METHOD[method], {field.name for field in dataclasses.fields(kind)}
        assert names - {"runtime_config"} <= known.supported | known.training_only | set(known.unsupported)
        assert not known.supported & known.training_only
        assert not (known.supported | known.training_only) & set(known.unsupported)
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    written = LoraConfig(r=8, task_type="CAUSAL_LM", target_modules=["q_proj"]).to_dict()
    assert {*written, "runtime_config"} == fields
    raw = json.loads(json.dumps(written, default=list))
    assert parse_config(raw, "x") == AdapterConfig("x", 8, 8.0, target_modules=("q_proj",), task_type="CAUSAL_LM")


SERVED = {
    **{"alpha_pattern": {"q_proj": 2}, "rank_pattern": {"q_proj": 2}, "lora_alpha": 3, "r": 3, "target_modules": ".*"},
    **dict.fromkeys(("use_dora", "use_rslora", "lora_bias", "ensure_weight_tying"), True),
    **{"exclude_modules": ["x"], "modules_to_save": ["x"], "layers_pattern": "x", "base_model_name_or_path": "x"},
    **{
        "kasa_config": {"beta": 0.1},
        "alora_invocation_tokens": [3, 4],
        "layers_to_transform": 0,
        "target_parameters": ["experts.down_proj"],
        "trainable_token_indices": {"wte": [2, 1]},
        "use_bdlora": {"nblocks": 2},
    },
}


@pytest.mark.parametrize("field", sorted(SERVED_FIELDS - {"bias"}))
def test_supported_fields_are_read(field: str) -> None:
    assert parse(**{field: SERVED[field]}) != parse()


@pytest.mark.parametrize("field", sorted(TRAINING_FIELDS - {"peft_type", "task_type", "init_lora_weights"}))
def test_training_fields_are_ignored(field: str) -> None:
    values: list[Any] = [{"some": ["thing"]}, "x", 0.3, True, [[[]]], "x" * 10_000_000]
    for value in values:
        assert parse(**{field: value}) == parse()


@pytest.mark.parametrize("field", NOT_WITH_INVOCATION)
def test_alora_is_rejected_with_features_that_peft_cannot_combine(field: str) -> None:
    with pytest.raises(AdapterError, match=f"alora_invocation_tokens = .* cannot be combined with {field}"):
        ConfigReader(BASE | {"alora_invocation_tokens": [3, 4], field: True}, "acme/tuned").read_invocation()


@pytest.mark.parametrize(("field", "value"), [("bias", "all"), ("task_type", "SEQ_CLS")])
def test_alora_requires_a_causal_lm_without_biases(field: str, value: str) -> None:
    with pytest.raises(AdapterError, match=f"alora_invocation_tokens = .* requires {field}"):
        parse(alora_invocation_tokens=[3, 4], **{field: value})


def test_alora_is_rejected_on_pooling_servers() -> None:
    config = parse(alora_invocation_tokens=[3, 4])
    with pytest.raises(AdapterError, match="aLoRA is supported only on servers that generate text"):
        check_base_model(config, "llama", "LlamaModel", None, task="embed")


def test_empty_kasa_config_enables_kasa() -> None:
    assert parse(kasa_config={}).use_kasa
    assert not parse(kasa_config=None).use_kasa


NOT_SERVED: list[Any] = ["LOHA", "ADALORA", "PROMPT_TUNING", "lora", "", None, 5, ["LORA"], {}]
UNKNOWN_TASKS: list[Any] = ["QUESTION_ANS", "SEQ_2_SEQ_LM", "", 0, []]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        *(
            ("alora_invocation_tokens", value, f"a list of 1 to {MAX_INVOCATION_TOKENS} token IDs")
            for value in (5, "x", True, {"a": 1}, ["x"], [1.5], [True], [None], [[1]], [3] * 1_000_000)
        ),
        *(("alora_invocation_tokens", value, "valid token IDs") for value in ([-1], [5, 2**31], [10**30])),
        ("arrow_config", {"top_k": 3}, "Arrow"),
        ("enable_lora", [True, False, True], "fused matrices"),
        *(("kasa_config", value, "beta and gamma") for value in (5, True, False, "x", [], [1], {"alpha": 1})),
        ("layer_replication", [[0, 4], [2, 5]], "repeated layers"),
        ("megatron_config", {"hidden_size": 3}, "Megatron"),
        ("use_qalora", True, "QALoRA"),
        *(("peft_type", kind, "only LORA, IA3, VERA, LN_TUNING are") for kind in NOT_SERVED),
        *(("task_type", task, "is not supported; only CAUSAL_LM") for task in UNKNOWN_TASKS),
        *(
            ("init_lora_weights", init, "path_initial_model_for_weight_conversion")
            for init in ("pissa", "pissa_niter_16", "PiSSA", "olora", "OLoRA", "loftq", "corda", "lora_ga")
        ),
        *(("init_lora_weights", init, "is unknown") for init in ("magic", "", None, 5, ["pissa"], {"x": "pissa"})),
        *(("bias", bias, "none, all and lora_only") for bias in ("some", "", None, False, 5, ["none"])),
        *(("not_yet_invented", value, "is unknown") for value in (True, 0, 1, "x", [0], {"a": None}, NAN)),
    ],
)
def test_unsupported_fields_are_rejected_by_name(field: str, value: Any, reason: str) -> None:
    with pytest.raises(AdapterError, match=f"adapter 'acme/tuned': config field {field} = .*{reason}"):
        parse(**{field: value})


@pytest.mark.parametrize("value", [None, False, "", [], {}])
@pytest.mark.parametrize("field", [*sorted(REFUSED_FIELDS), "not_yet_invented"])
def test_disabled_fields_are_accepted(field: str, value: Any) -> None:
    assert parse(**{field: value}) == parse()


@pytest.mark.parametrize("init", [True, False, "true", "gaussian", "orthogonal", "eva", "mica", "MiCA"])
@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_known_init_and_bias_values_are_accepted(init: bool | str, bias: str) -> None:
    assert parse(init_lora_weights=init, bias=bias) == parse()


INVALID_NAMES = [5, True, NAN, {"a": 1}, [1], [["a"]], [None], ["a", 1], [{}]]
INVALID_FLAGS = ["true", 0, 1, [True], {"a": 1}, NAN, [], {}]
INVALID_TOKENS = ["x", 5, True, NAN, [-1], [True], [1.0], [1, 1], ["1"], [[1]], [None], {"wte": 5}, {"wte": [-1]}]
NOT_RANKS: list[Any] = ["1", 0, -1, True, 1.0, NAN, None, [1], {}, 10**9]
NOT_ALPHAS: list[Any] = ["1", True, NAN, INF, None, [1], {}, -(10**400), 1e31]
WRONG = {
    "r": ["8", True, 0, -1, 65537, 10**400, 8.0, NAN, None, [8], {}, "x" * 10_000_000],
    "lora_alpha": ["8", True, NAN, INF, -INF, None, [1], {}, 10**400, 1e300, -1e31],
    "rank_pattern": ["x", 5, True, [1], *({"a": x} for x in NOT_RANKS)],
    "alpha_pattern": ["x", 5, True, [1], *({"a": x} for x in NOT_ALPHAS)],
    "target_modules": INVALID_NAMES,
    "exclude_modules": INVALID_NAMES,
    "modules_to_save": INVALID_NAMES,
    "layers_pattern": INVALID_NAMES,
    "layers_to_transform": ["1", 1.0, True, NAN, {"a": 1}, ["1"], [1.0], [True], [None], [[1]]],
    "trainable_token_indices": INVALID_TOKENS,
    "use_bdlora": ["x", 5, True, NAN, [1], {"x": 1}, *({"nblocks": x} for x in (0, "2", True, None))],
    "base_model_name_or_path": [5, True, NAN, ["x"], {"a": 1}],
    "kasa_config": [5, True, NAN, ["x"], {"a": 1}],
    **dict.fromkeys(("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying"), INVALID_FLAGS),
}
WRONG_VALUES = [(field, value) for field, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("field", "value"), WRONG_VALUES, ids=lambda value: str(value)[:40])
def test_wrong_types_are_rejected(field: str, value: Any) -> None:
    with pytest.raises(AdapterError, match=f"adapter 'acme/tuned': config field ({field}|nblocks) = ") as refusal:
        parse(**{field: value})
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_too_many_patterns_are_rejected(field: str) -> None:
    with pytest.raises(AdapterError, match=f"adapter 'acme/tuned': config field {field} = "):
        parse(**{field: {str(number): 1 for number in range(MAX_PATTERNS + 1)}})


@pytest.mark.parametrize("field", sorted({*SERVED_FIELDS, *TRAINING_FIELDS, *REFUSED_FIELDS}))
def test_invalid_fields_raise_only_adapter_error(field: str) -> None:
    deep = json.loads("[" * 500 + "]" * 500)
    values: list[Any] = [
        *(deep, {"x": deep}, "\ud800\x00\n", "x" * 100_000, list(range(9000)), [{}] * 1000, {"": ""}, -0.0)
    ]
    for value in values:
        with contextlib.suppress(AdapterError):
            parse(**{field: value})


@pytest.mark.parametrize(
    ("changes", "found_type", "message"),
    [
        ({}, None, None),
        ({}, "llama", None),
        ({"auto_mapping": {"base_model_class": "LlamaForCausalLM"}}, "llama", None),
        ({"auto_mapping": {"base_model_class": 5}}, None, None),
        ({"auto_mapping": "nonsense"}, None, None),
        ({"base_model_name_or_path": "acme/b"}, "opt", r"'acme/tuned' .*'acme/b', which has model_type 'opt'.*'llama'"),
        ({"auto_mapping": {"base_model_class": "OPTForCausalLM"}}, None, "'acme/tuned' .*OPTFor.* is a LlamaFor"),
        ({"auto_mapping": {"base_model_class": "LlamaModel"}}, "llama", "'acme/tuned' .*a LlamaModel;"),
    ],
)
def test_adapter_for_different_base_model_is_rejected(
    changes: dict[str, Any], found_type: str | None, message: str | None
) -> None:
    config = parse(**changes)
    if message is None:
        return check_base_model(config, "llama", "LlamaForCausalLM", found_type)
    with pytest.raises(AdapterError, match=message):
        check_base_model(config, "llama", "LlamaForCausalLM", found_type)


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION"])
def test_adapter_for_different_task_is_rejected(task_type: str) -> None:
    config = parse_config(BASE | {"task_type": task_type}, "x")
    check_base_model(config, "llama", "LlamaForCausalLM", None, "classify")
    with pytest.raises(AdapterError, match=f"task_type = '{task_type}' is not supported; this server generates text"):
        check_base_model(config, "llama", "LlamaForCausalLM", None)
