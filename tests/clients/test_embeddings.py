"""Embeddings with OpenAI's client, LangChain, LlamaIndex and Haystack, for an encoder and an adapter."""

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import openai
import pytest
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from pydantic import SecretStr

from tests.clients.conftest import PYTHON, ROOT, UNKNOWN_MODEL, Server, serving

TEXTS = ["the cat sat on the mat", "john lives in paris", "what is a dog, and what is it?"]
MODELS = ["base", "tuned"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, origin: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("encoder")
    subprocess.run([PYTHON, "-m", "tests.clients.make_encoder", folder], cwd=ROOT, check=True)
    flags = ("--model-id", str(folder / "model"), "--adapters-dir", str(folder / "adapters"), "--no-hub")
    with serving(origin, *flags, "--served-model-name", "base") as server:
        yield server


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(encoder: Server, model: str) -> list[list[float]]:
    """The embeddings of `TEXTS` in a plain HTTP response."""
    data = encoder.post("/v1/embeddings", {"model": model, "input": TEXTS})["data"]
    return [item["embedding"] for item in data]


def assert_same(found: Sequence[Any], expected: Sequence[Sequence[float]]) -> None:
    assert [len(vector) for vector in found] == [len(vector) for vector in expected]
    assert list(chain(*found)) == pytest.approx(list(chain(*expected)), abs=1e-7)


def test_models_return_different_embeddings(encoder: Server) -> None:
    vectors = [encoder.post("/v1/embeddings", {"model": name, "input": TEXTS[0]})["data"][0] for name in MODELS]
    assert vectors[0]["embedding"] != vectors[1]["embedding"]


def test_openai_reads_floats_and_base64(encoder: Server, model: str, expected: list[list[float]]) -> None:
    with openai.OpenAI(base_url=encoder.v1, api_key="none") as client:
        for options in ({}, {"encoding_format": "float"}):
            response = client.embeddings.create(model=model, input=TEXTS, **options)  # type: ignore[arg-type]
            assert_same([item.embedding for item in response.data], expected)


def make_langchain(encoder: Server, model: str) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        model=model,
        base_url=encoder.v1,
        api_key=SecretStr("none"),
        max_retries=0,
        check_embedding_ctx_length=False,  # else the client sends OpenAI's token IDs instead of text
    )


def test_langchain(encoder: Server, model: str, expected: list[list[float]]) -> None:
    client = make_langchain(encoder, model)
    assert_same(client.embed_documents(TEXTS), expected)
    assert_same([client.embed_query(TEXTS[0])], expected[:1])
    assert_same(asyncio.run(client.aembed_documents(TEXTS)), expected)


def test_langchain_raises_not_found_for_unknown_model(encoder: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        make_langchain(encoder, UNKNOWN_MODEL).embed_query(TEXTS[0])


def make_llama_index(encoder: Server, model: str) -> OpenAILikeEmbedding:
    return OpenAILikeEmbedding(model_name=model, api_base=encoder.v1, api_key="none", max_retries=0)


def test_llama_index(encoder: Server, model: str, expected: list[list[float]]) -> None:
    client = make_llama_index(encoder, model)
    assert_same(client.get_text_embedding_batch(TEXTS), expected)
    assert_same([client.get_query_embedding(TEXTS[0])], expected[:1])
    assert_same(asyncio.run(client.aget_text_embedding_batch(TEXTS)), expected)


def test_llama_index_raises_not_found_for_unknown_model(encoder: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        make_llama_index(encoder, UNKNOWN_MODEL).get_query_embedding(TEXTS[0])


def haystack_options(encoder: Server, model: str) -> dict[str, Any]:
    return {"model": model, "api_base_url": encoder.v1, "api_key": Secret.from_token("none"), "max_retries": 0}


def test_haystack(encoder: Server, model: str, expected: list[list[float]]) -> None:
    options = haystack_options(encoder, model)
    found = OpenAITextEmbedder(**options).run(text=TEXTS[0])
    assert_same([found["embedding"]], expected[:1])
    documents = OpenAIDocumentEmbedder(**options, progress_bar=False).run([Document(content=text) for text in TEXTS])
    assert_same([document.embedding for document in documents["documents"]], expected)
    assert documents["meta"]["usage"]["prompt_tokens"] > 0


def test_haystack_raises_not_found_for_unknown_model(encoder: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        OpenAITextEmbedder(**haystack_options(encoder, UNKNOWN_MODEL)).run(text=TEXTS[0])
