"""Embeddings, classification, reranking and scores over HTTP, against transformers and PEFT."""

import base64
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lorax
import numpy as np
import openai
import pytest
import torch
import transformers as t

from tests.e2e.http_server import Server, serving
from tests.parity.test_pooled_models import copy_body, save_adapter
from tests.pooled import make_model, save_tokenizer, save_transformer_folder

pytestmark = pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")  # lorax-client calls it

TEXTS = ["john smith lives in paris", "the cat", "what is a dog and what is it, a cat on the mat!"]
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
TOLERANCE = 1e-5


class World(NamedTuple):
    server: Server
    model: Any
    tokenizer: Any
    tuned: Any  # the PEFT model of adapter `tuned`

    def run(self, text: Any, tuned: bool = False, pair: str | None = None) -> Any:
        model = self.tuned if tuned else self.model
        with torch.no_grad():
            return model(**self.tokenizer(text, pair, return_tensors="pt"))


def start(folder: Path, head: str, **settings: Any) -> tuple[Any, Any, Any]:
    """Save a model, its tokenizer and an adapter. Return the models and the tokenizer."""
    model = make_model("bert", head, folder / "model", **settings)
    more = {"num_labels": 3} if head != "Model" and settings["num_labels"] > 1 else settings
    other = copy_body(model, make_model("bert", head, **more))
    kind = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}.get(head)
    tuned = save_adapter(other, folder / "adapters" / "tuned", target_modules=["query"], task_type=kind)
    return model, save_tokenizer(folder / "model"), tuned


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("embedder")
    model, tokenizer, tuned = start(folder, "Model")
    save_transformer_folder(folder / "model", prompts={"query": "query ", "document": "document "}, normalize=True)
    with serving(folder) as server:
        yield World(server, model, tokenizer, tuned)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tagger")
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    model, tokenizer, tuned = start(folder, "ForTokenClassification", num_labels=5, **names)
    with serving(folder) as server:
        yield World(server, model, tokenizer, tuned)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A cross-encoder."""
    folder = tmp_path_factory.mktemp("judge")
    model, tokenizer, tuned = start(folder, "ForSequenceClassification", num_labels=1)
    with serving(folder) as server:
        yield World(server, model, tokenizer, tuned)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("classifier")
    model, tokenizer, tuned = start(folder, "ForSequenceClassification", num_labels=4)
    with serving(folder) as server:
        yield World(server, model, tokenizer, tuned)


def mean(world: World, text: str, tuned: bool = False) -> Any:
    """Return the expected embedding."""
    vector = world.run(text, tuned).last_hidden_state[0].mean(0)
    return (vector / vector.norm()).numpy()


def assert_close(found: Any, expected: Any) -> None:
    assert np.abs(np.asarray(found) - np.asarray(expected)).max() < TOLERANCE


# --- Embeddings -------------------------------------------------------------------------------------------------------


def test_openai_client_reads_embeddings(embedder: World) -> None:
    with openai.OpenAI(base_url=f"{embedder.server.url}/v1", api_key="none") as client:
        response = client.embeddings.create(model="", input=TEXTS)  # the client requests base64
        assert response.usage.prompt_tokens == sum(len(ids) for ids in embedder.tokenizer(TEXTS)["input_ids"])
        for text, item in zip(TEXTS, response.data, strict=True):
            assert_close(item.embedding, mean(embedder, text))
        tuned = client.embeddings.create(model="tuned", input=TEXTS[0], encoding_format="float")
        assert_close(tuned.data[0].embedding, mean(embedder, TEXTS[0], tuned=True))


def test_token_id_input_matches_text_input(embedder: World) -> None:
    ids = embedder.tokenizer(TEXTS)["input_ids"]
    one = embedder.server.post("/v1/embeddings", {"input": ids[0]}).json
    many = embedder.server.post("/v1/embeddings", {"input": ids}).json
    assert one["data"][0] == many["data"][0]
    for text, item in zip(TEXTS, many["data"], strict=True):
        assert_close(item["embedding"], mean(embedder, text))


def test_base64_contains_float32(embedder: World) -> None:
    body = {"input": TEXTS[0], "encoding_format": "base64"}
    encoded = embedder.server.post("/v1/embeddings", body).json["data"][0]["embedding"]
    assert_close(np.frombuffer(base64.b64decode(encoded), np.float32), mean(embedder, TEXTS[0]))


def test_dimensions_truncate_and_normalize(embedder: World) -> None:
    body = {"input": TEXTS[0], "dimensions": 8}
    vector = mean(embedder, TEXTS[0])[:8]
    found = embedder.server.post("/v1/embeddings", body).json["data"][0]["embedding"]
    assert_close(found, vector / np.linalg.norm(vector))
    response = embedder.server.post("/v1/embeddings", body | {"dimensions": 33})
    assert (response.status, "at most 32" in response.json["error"]["message"]) == (400, True)


def test_prompt_is_prepended_to_text(embedder: World) -> None:
    body = {"input": "the cat", "prompt_name": "query"}
    found = embedder.server.post("/v1/embeddings", body).json["data"][0]["embedding"]
    assert_close(found, mean(embedder, "query the cat"))


def test_lorax_client_reads_embeddings(embedder: World) -> None:
    found = lorax.Client(embedder.server.url).embed(TEXTS[0]).embeddings
    assert_close(found, mean(embedder, TEXTS[0]))


def test_embed_route_accepts_adapters_and_lists(embedder: World) -> None:
    body = {"inputs": TEXTS, "parameters": {"adapter_id": "tuned"}}
    response = embedder.server.post("/embed", body)
    assert response.headers["x-adapter-id"] == "tuned"
    for text, found in zip(TEXTS, response.json["embeddings"], strict=True):
        assert_close(found, mean(embedder, text, tuned=True))


def test_rerank_with_embedding_model_uses_cosine_and_prompts(embedder: World) -> None:
    body = {"query": "cat", "documents": TEXTS, "return_documents": False}
    found = embedder.server.post("/v1/rerank", body).json["results"]
    query = mean(embedder, "query cat")
    expected = {i: float(query @ mean(embedder, f"document {text}")) for i, text in enumerate(TEXTS)}
    assert [item["index"] for item in found] == sorted(expected, key=lambda index: -expected[index])
    assert_close([item["relevance_score"] for item in found], [expected[item["index"]] for item in found])


def test_embedding_model_scores_are_symmetric(embedder: World) -> None:
    found = embedder.server.post("/v1/score", {"text_1": "cat", "text_2": TEXTS}).json["data"]
    assert_close([item["score"] for item in found], [mean(embedder, "cat") @ mean(embedder, text) for text in TEXTS])


@pytest.mark.parametrize(("path", "names"), [("/rerank", ("query", "documents")), ("/v1/score", ("text_1", "text_2"))])
def test_instruction_is_rejected_by_models_that_ignore_it(embedder: World, path: str, names: tuple[str, str]) -> None:
    response = embedder.server.post(path, {names[0]: "cat", names[1]: TEXTS, "instruction": "rank"})
    assert response.status in (400, 422)
    assert b"`instruction` has no effect" in response.body


# --- Classification ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuned", [False, True])
def test_entities_match_transformers_pipeline(tagger: World, tuned: bool) -> None:
    model = tagger.tuned.get_base_model() if tuned else tagger.model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = t.pipeline(
            "token-classification", model, tokenizer=tagger.tokenizer, aggregation_strategy="simple", device="cpu"
        )
    expected = pipeline(TEXTS)
    body = {"inputs": TEXTS, "parameters": {"adapter_id": "tuned" if tuned else None}}
    found = tagger.server.post("/classify_batch", body).json
    for text, ours, theirs in zip(TEXTS, found, expected, strict=True):
        keys = ("entity_group", "start", "end")
        assert [[e[key] for key in keys] for e in ours] == [[e[key] for key in keys] for e in theirs]
        assert_close([e["score"] for e in ours] or [0], [e["score"] for e in theirs] or [0])
        assert all(e["word"] == text[e["start"] : e["end"]] for e in ours)
    assert any(found)


def test_lorax_client_reads_entities(tagger: World) -> None:
    client = lorax.Client(tagger.server.url)
    one, many = client.classify(TEXTS[0]), client.classify_batch(TEXTS)
    assert one.entities
    assert one == many[0]


def test_labels_match_transformers(classifier: World) -> None:
    found = classifier.server.post("/v1/classify", {"input": TEXTS}).json["data"]
    for text, item in zip(TEXTS, found, strict=True):
        expected = classifier.run(text).logits[0].softmax(-1).numpy()
        assert_close(item["probs"], expected)
        assert item["label"] == f"LABEL_{int(expected.argmax())}"
    tuned = classifier.server.post("/v1/classify", {"input": TEXTS[0], "model": "tuned"}).json["data"][0]
    assert_close(tuned["probs"], classifier.run(TEXTS[0], tuned=True).logits[0].softmax(-1).numpy())
    ranked = classifier.server.post("/classify", {"inputs": TEXTS[0]}).json
    assert [each["score"] for each in ranked] == sorted(found[0]["probs"], reverse=True)


# --- Reranking and scores ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_cross_encoder_ranks_documents(judge: World, path: str) -> None:
    body = {"query": "cat", "documents": [{"text": TEXTS[0]}, *TEXTS[1:]], "top_n": 2}
    response = judge.server.post(path, body).json
    scores = [float(judge.run("cat", pair=text).logits[0, 0].sigmoid()) for text in TEXTS]
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [item["index"] for item in response["results"]] == order
    assert [item["document"]["text"] for item in response["results"]] == [TEXTS[index] for index in order]
    assert_close([item["relevance_score"] for item in response["results"]], [scores[index] for index in order])


def test_score_route_scores_text_pairs(judge: World) -> None:
    expected = [float(judge.run("cat", tuned=True, pair=text).logits[0, 0].sigmoid()) for text in TEXTS]
    found = judge.server.post("/v1/score", {"text_1": "cat", "text_2": TEXTS, "model": "tuned"}).json["data"]
    assert_close([item["score"] for item in found], expected)
    response = judge.server.post("/v1/score", {"text_1": ["a", "b"], "text_2": TEXTS})
    assert (response.status, "as many as `text_2`" in response.json["error"]["message"]) == (400, True)


def test_truncated_pairs_match_transformers(judge: World) -> None:
    long = "the cat sat on " * 30
    with torch.no_grad():
        encoded = judge.tokenizer("cat " * 3, long, truncation=True, max_length=64, return_tensors="pt")
        expected = float(judge.model(**encoded).logits[0, 0].sigmoid())
    found = judge.server.post("/v1/score", {"text_1": "cat " * 3, "text_2": long, "truncate": True}).json
    assert_close([item["score"] for item in found["data"]], [expected])


def test_pairs_may_exceed_one_slice(judge: World) -> None:
    documents = (TEXTS * 25)[:70]
    found = judge.server.post("/v1/score", {"text_1": "cat", "text_2": documents}).json["data"]
    expected = [float(judge.run("cat", pair=text).logits[0, 0].sigmoid()) for text in TEXTS]
    assert_close([item["score"] for item in found], (expected * 25)[:70])


def test_total_pair_size_is_limited(judge: World) -> None:
    body = {"query": "a" * 10_000, "documents": ["a"] * 1000, "truncate": True}
    response = judge.server.post("/v1/rerank", body)
    assert response.status == 400
    assert "at most 8388608 characters in all pairs together" in response.json["error"]["message"]


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/", {"inputs": "a", "stream": True}),
        ("/generate", {"inputs": "a"}),
        ("/generate_stream", {"inputs": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses", {"input": "a", "stream": True}),
        ("/classify", {"inputs": "a"}),
        ("/classify_batch", {"inputs": ["a"]}),
        ("/v1/classify", {"input": "a"}),
    ],
)
def test_route_for_different_task_names_model_task(embedder: World, path: str, body: Any) -> None:
    response = embedder.server.post(path, body)
    assert response.status in (400, 422)
    assert b"it is served for embeddings (--task embed)" in response.body


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"input": ""}, "`input` cannot be empty"),
        ({"input": []}, "`input` cannot be empty"),
        ({"input": ["a", ""]}, "`input` cannot be empty"),
        ({"input": [[]]}, "`input` cannot be empty"),
        ({"input": ["a"] * 10_000}, "at most 2048"),
        ({"input": [100]}, "beyond the vocabulary of 100"),
        ({"input": [-1]}, ""),
        ({"input": [1, "a"]}, "input: Input should be a string, a list of strings, "),
        ({"input": {"a": 1}}, "input: Input should be a string, a list of strings, "),
        ({"input": None}, "input: Input should be a string, a list of strings, "),
        ({}, "input: Field required"),
        ({"input": "a \ud800"}, "lone surrogate"),
        ({"input": "cat " * 100}, "`input` must have at most 64 tokens"),
        ({"input": "cat " * 400_000}, "`input` must have at most 64 tokens"),
        ({"input": "a", "encoding_format": "int8"}, ""),
        ({"input": "a", "dimensions": 0}, ""),
        ({"input": "a", "dimensions": 1.5}, ""),
        ({"input": "a", "prompt_name": "x"}, "`prompt_name` 'x' is unknown; this model's prompts: document, query"),
        ({"input": [5], "prompt_name": "query"}, "`prompt_name` has no effect on token IDs"),
        ({"input": "a", "model": "missing"}, ""),
        ({"input": "a", "input_type": "query"}, "use `prompt_name` instead"),
    ],
)
def test_invalid_requests_are_rejected(embedder: World, body: Any, problem: str) -> None:
    response = embedder.server.post("/v1/embeddings", body)
    assert response.status in (400, 404)
    assert problem in response.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "`query` cannot be empty"),
        ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "`documents` cannot be empty"),
        ("/v1/rerank", {"query": "a", "documents": [5]}, "documents: Input should be a list of strings, or of objects"),
        (
            "/v1/rerank",
            {"query": "a", "documents": [{}]},
            "documents: Input should be a list of strings, or of objects",
        ),
        ("/v1/rerank", {"query": "\ud800", "documents": ["a"]}, "`query` contains a lone surrogate"),
        ("/rerank", {"query": "", "documents": ["a"]}, "`query` cannot be empty"),
        ("/rerank", {"query": "a", "documents": []}, "`documents` cannot be empty"),
        ("/v1/score", {"text_1": "", "text_2": "a"}, "`text_1` cannot be empty"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", ""]}, "`text_2` cannot be empty"),
        ("/v1/score", {"text_1": 5, "text_2": "a"}, "text_1: Input should be a string or a list of strings"),
    ],
)
def test_error_names_invalid_field(embedder: World, path: str, body: Any, problem: str) -> None:
    response = embedder.server.post(path, body)
    assert response.status in (400, 422)
    assert problem in response.body.decode()


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/embed", {"inputs": "a", "dimensions": 8}, "dimensions"),
        ("/embed", {"inputs": "a", "parameters": {"prompt_name": "query"}}, "prompt_name"),
        ("/embed", {"inputs": "a", "encoding_format": "base64"}, "encoding_format"),
        ("/embed", {"inputs": "a", "adapter_id": "tuned"}, "adapter_id"),
        ("/v1/embeddings", {"input": "a", "instruction": "find"}, "instruction"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "dimensions": 8}, "dimensions"),
        ("/rerank", {"query": "a", "documents": ["b"], "prompt_name": "query"}, "prompt_name"),
    ],
)
def test_fields_of_other_routes_are_rejected(embedder: World, path: str, body: Any, name: str) -> None:
    response = embedder.server.post(path, body)
    assert response.status in (400, 422)
    assert f"`{name}` is not".encode() in response.body


def test_tokenizer_routes_work(embedder: World) -> None:
    tokens = embedder.server.post("/tokenize", {"inputs": "the cat"}).json
    ids = embedder.tokenizer("the cat")["input_ids"]
    assert [token["id"] for token in tokens] == ids
    assert embedder.server.post("/detokenize", {"ids": ids[1:-1]}).json == {"text": "the cat"}


def test_too_long_texts_are_truncated_on_request(embedder: World) -> None:
    found = embedder.server.post("/v1/embeddings", {"input": "cat " * 100, "truncate": True}).json
    assert found["usage"]["prompt_tokens"] == 64
    assert_close(found["data"][0]["embedding"], mean(embedder, "cat " * 62))


def test_largest_allowed_request_is_served(embedder: World) -> None:
    found = embedder.server.post("/v1/embeddings", {"input": ["the cat"] * 2048, "encoding_format": "base64"}).json
    assert len({item["embedding"] for item in found["data"]}) == 1
    assert [item["index"] for item in found["data"]] == list(range(2048))


def test_pooling_models_have_health_and_metrics_routes(embedder: World) -> None:
    assert embedder.server.send("GET", "/health").status == 200
    assert embedder.server.send("GET", "/startup").status == 200
    assert embedder.server.send("GET", "/info").json["max_input_length"] == 64
    assert b"lorax_request_success" in embedder.server.send("GET", "/metrics").body
