"""Embeddings, classification and scores against transformers and PEFT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from lorax_server.errors import AdapterError, ConfigError
from tests.pooled import LENGTHS, MODELS, PooledEngine, Text, make_model, make_sequences, save_tokenizer

TOLERANCE = 1e-5
QUERIES = {
    "bert": ["query", "value", "intermediate.dense"],
    "distilbert": ["q_lin", "lin2"],
    "modernbert": ["Wqkv", "Wi"],
    "mpnet": ["attn.q", "attn.o"],
    "nomic_bert": ["q_proj", "down_proj", "gate_proj"],
    "roberta": ["query", "word_embeddings"],
    "qwen3": ["q_proj", "down_proj"],
}


def compute(model: Any, ids: list[int], **more: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor([ids]), **more)


def assert_close(result: Any, expected: torch.Tensor) -> None:
    assert result.shape == tuple(expected.shape)
    assert np.abs(result - expected.numpy()).max() < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_match_transformers(name: str, tmp_path: Path) -> None:
    model, sequences = make_model(name, "Model", tmp_path), make_sequences()
    with PooledEngine(tmp_path, "embed", pooling="mean") as engine:
        results = engine.run([Text(ids) for ids in sequences])
    for ids, result in zip(sequences, results, strict=True):
        assert_close(result, compute(model, ids).last_hidden_state[0].mean(0))


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("name", MODELS)
def test_classification_matches_transformers(name: str, head: str, tmp_path: Path) -> None:
    model, sequences = make_model(name, head, tmp_path, num_labels=5), make_sequences()
    with PooledEngine(tmp_path) as engine:
        results = engine.run([Text(ids) for ids in sequences])
    for ids, result in zip(sequences, results, strict=True):
        assert_close(result, compute(model, ids).logits[0])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("cls", lambda x: x[0]),
        ("lasttoken", lambda x: x[-1]),
        ("max", lambda x: x.amax(0)),
    ],
)
def test_each_pooling_mode_matches_its_definition(
    mode: str, expected: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    model, (ids,) = make_model("bert", "Model", tmp_path), make_sequences(lengths=[9])
    with PooledEngine(tmp_path, pooling=mode) as engine:
        (result,) = engine.run([Text(ids)])
    assert_close(result, expected(compute(model, ids).last_hidden_state[0]))


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_token_types_mark_second_text(name: str, tmp_path: Path) -> None:
    model, (ids,) = (
        make_model(name, "ForSequenceClassification", tmp_path, num_labels=1, type_vocab_size=2),
        (make_sequences(lengths=[9])),
    )
    with PooledEngine(tmp_path) as engine:
        single, pair = engine.run([Text(ids), Text(ids, second_start=4)])
    types = torch.tensor([[0] * 4 + [1] * 5])
    assert_close(single, compute(model, ids).logits[0])
    assert_close(pair, compute(model, ids, token_type_ids=types).logits[0])
    assert abs(single - pair).max() > 1e-3


@pytest.mark.parametrize("name", ["roberta", "mpnet", "llama"])
def test_padding_tokens_in_text_match_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name, "ForSequenceClassification", tmp_path)
    ids = [5, 1, 7, 8, 1, 9, 0, 0] if name != "llama" else [5, 6, 0, 7, 0, 0]
    with PooledEngine(tmp_path) as engine:
        _, result = engine.run([Text([4, 5]), Text(ids)])
    assert_close(result, compute(model, ids).logits[0])


def test_yes_no_scores_match_transformers(tmp_path: Path) -> None:
    model, sequences = make_model("qwen3", "ForCausalLM", tmp_path), make_sequences()
    ids_of = save_tokenizer(tmp_path).convert_tokens_to_ids
    with PooledEngine(tmp_path, "score") as engine:
        results = engine.run([Text(ids) for ids in sequences])
    for ids, result in zip(sequences, results, strict=True):
        no, yes = compute(model, ids).logits[0, -1, [ids_of("no"), ids_of("yes")]]
        assert_close(result, (yes - no)[None])


@pytest.mark.parametrize("name", MODELS)
def test_pooled_results_are_batch_invariant(name: str, tmp_path: Path) -> None:
    """The bits of a result are the same for a sequence alone, in a pair, and in a large batch."""
    make_model(name, "ForSequenceClassification", tmp_path)
    texts = [Text(ids) for ids in make_sequences(lengths=(*LENGTHS, 3, 1, *LENGTHS))]
    with PooledEngine(tmp_path) as engine:
        together = engine.run(texts)
        alone = [engine.run([text])[0] for text in texts]
        pairs = [engine.run([text, texts[0]])[0] for text in texts]
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(together, pairs, strict=True))


def test_sequence_may_exceed_step_token_budget(tmp_path: Path) -> None:
    make_model("bert", "Model", tmp_path)
    texts = [Text(ids) for ids in make_sequences(lengths=(60, 3, 40, 2, 1))]
    with PooledEngine(tmp_path) as engine:
        expected = engine.run(texts)
    with PooledEngine(tmp_path, max_step_tokens=8, max_num_seqs=2) as engine:
        results = engine.run(texts)
    assert all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True))


# --- Adapters ---------------------------------------------------------------------------------------------------------


def save_adapter(base: Any, folder: Path, **settings: Any) -> Any:
    """Save a random adapter, and return the PEFT model."""
    model = get_peft_model(base, LoraConfig(**settings)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(str(folder))
    return model


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize(
    ("head", "task_type"),
    [
        ("Model", "FEATURE_EXTRACTION"),
        ("ForSequenceClassification", "SEQ_CLS"),
        pytest.param("ForTokenClassification", "TOKEN_CLS", marks=pytest.mark.slow),
    ],
)
def test_thirty_adapters_in_one_batch_match_peft(name: str, head: str, task_type: str, tmp_path: Path) -> None:
    """Each adapter has its own rank, and its own number of labels."""
    folder = tmp_path / "base"
    base = make_model(name, head, folder, num_labels=2)
    texts, expected = [], []
    for index in range(30 if name == "bert" else 3):
        model = copy_body(base, make_model(name, head, num_labels=2 + index % 3))
        adapter = tmp_path / f"adapter-{index}"
        saved = ["classifier", "pre_classifier", "score"] if index % 2 and head != "Model" else None
        settings = {"task_type": task_type, "r": 2 + index % 5, "modules_to_save": saved}
        tuned = save_adapter(model, adapter, target_modules=QUERIES[name], **settings)
        for ids in make_sequences(index, lengths=(7, 3)):
            texts.append(Text(ids, str(adapter)))
            out = compute(tuned, ids)
            expected.append(out.last_hidden_state[0].mean(0) if head == "Model" else out.logits[0])
    order = np.random.default_rng(0).permutation(len(texts))
    more = {"pooling": "mean", "task": "embed"} if head == "Model" else {}
    with PooledEngine(folder, roots=[tmp_path], **more) as engine:
        results = engine.run([texts[i] for i in order])
    for i, result in zip(order, results, strict=True):
        assert_close(result, expected[i])


def copy_body(source: Any, model: Any) -> Any:
    """Copy all weights except a head of another size, and return the model."""
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    same = {key: value for key, value in source.state_dict().items() if value.shape == shapes[key]}
    model.load_state_dict(same, strict=False)
    return model


def test_adapter_can_provide_missing_classifier_head(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = make_model("bert", "ForSequenceClassification", num_labels=4)
    model.bert.save_pretrained(base)
    tuned = save_adapter(model, tmp_path / "topics", task_type="SEQ_CLS", target_modules=["query"])
    (ids,) = make_sequences(lengths=[7])
    with PooledEngine(base, "classify", roots=[tmp_path]) as engine:
        result, without = engine.run([Text(ids, str(tmp_path / "topics")), Text(ids)])
        assert_close(result, compute(tuned, ids).logits[0])
        assert without.shape == (0,)
        save_adapter(make_model("bert", "Model"), tmp_path / "plain", target_modules=["query"])
        with pytest.raises(AdapterError, match="module 'classifier' has no weight in the file"):
            engine.run([Text(ids, str(tmp_path / "plain"))])


def test_classifier_lora_matches_peft(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = make_model("roberta", "ForSequenceClassification", base, num_labels=3)
    modules = ["query", "classifier.dense", "classifier.out_proj"]
    tuned = save_adapter(model, tmp_path / "lora", target_modules=modules, use_dora=True)
    (ids,) = make_sequences(lengths=[7])
    with PooledEngine(base, roots=[tmp_path]) as engine:
        (result,) = engine.run([Text(ids, str(tmp_path / "lora"))])
    assert_close(result, compute(tuned, ids).logits[0])


@pytest.mark.parametrize(
    ("field", "value", "is_served"),
    [
        ("activation_function", "swiglu", True),
        ("rotary_emb_base", 1000, True),
        ("use_rms_norm", None, True),
        ("n_layer", 4, False),
        ("num_experts", 8, False),
        ("rotary_emb_base", 10_000, False),
    ],
)
def test_nomic_bert_with_original_config_fields(field: str, value: Any, is_served: bool, tmp_path: Path) -> None:
    """transformers ignores the fields of the model's original code, so other values would give wrong results."""
    make_model("nomic_bert", "Model", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    if is_served:
        with PooledEngine(tmp_path) as engine:
            assert engine.run([Text([5, 6])])[0].shape == (32,)
        return
    with pytest.raises(ConfigError, match=f"config field {field} = {value} is not supported"):
        PooledEngine(tmp_path)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"task": "generate"}, "task = generate is not supported: the model is an encoder"),
        ({"tensor_parallel": 2}, "does not support tensor parallelism"),
    ],
)
def test_unsupported_settings_are_rejected(settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_model("bert", "Model", tmp_path)
    with pytest.raises(ConfigError, match=problem):
        PooledEngine(tmp_path, **settings)
