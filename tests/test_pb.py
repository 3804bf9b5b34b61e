"""Protobuf messages: generated code, LoRAX field numbers, and lazy imports."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lorax_server.generation.stopping import FinishReason
from lorax_server.models.contract.types import AlternativeTokens, GeneratedText, Generation, NextTokens
from lorax_server.pb import generate_pb2 as pb
from tests.models.driving import request, run
from tests.models.tiny import Zoo

ROOT = Path(__file__).parent.parent
GENERATED = ["generate_pb2.py", "generate_pb2.pyi"]

# Section 5 of LoRAX's internal contract: name, number, and whether it is repeated (*) or optional (?).
FIELDS = {
    "NextTokenChooserParameters": (
        "temperature=1 top_k=2 top_p=3 typical_p=4 do_sample=5 seed=6 repetition_penalty=7 frequency_penalty=8 "
        "presence_penalty=9 watermark=10 adapter_id=11 schema=12? return_k_alternatives=13"
    ),
    "StoppingCriteriaParameters": "max_new_tokens=1 stop_sequences=2* ignore_eos_token=3",
    "Image": "data=1 mimetype=2",
    "InputChunk": "text=1 image=2",
    "TokenizedInputs": "ids=1* input_chunks=2*",
    "Request": (
        "id=1 inputs=2 tokenized_inputs=3 truncate=4 parameters=5 stopping_parameters=6 prefill_logprobs=7 "
        "adapter_index=8 blocks=9* slots=10* cache_len=11 chunk_len=12?"
    ),
    "Batch": "id=1 requests=2* size=3 max_tokens=4 max_blocks=5",
    "CachedBatch": "id=1 request_ids=2* size=3 max_tokens=4 current_tokens=5",
    "GeneratedText": "text=1 generated_tokens=2 skipped_tokens=3 finish_reason=4 seed=5?",
    "AlternativeTokens": "ids=1* logprobs=2* texts=3*",
    "NextTokens": "ids=1* logprobs=2* texts=3* is_special=4* alternative_tokens=5*",
    "Generation": "request_id=1 prefill_tokens=2 next_tokens=3 generated_text=4? prefill_tokens_length=5",
}
TYPES = {
    "temperature": "float",
    "top_k": "uint32",
    "do_sample": "bool",
    "seed": "uint64",
    "adapter_id": "string",
    "data": "bytes",
    "truncate": "uint32",
    "request_ids": "uint64",
    "request_id": "uint64",
    "logprobs": "float",
    "is_special": "bool",
    "finish_reason": "enum",
}
KINDS = ["float", "uint32", "uint64", "bool", "string", "bytes", "enum", "message"]
OWN_FROM = 100


# --- Definition -------------------------------------------------------------------------------------------------------


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    command = ["-m", "grpc_tools.protoc", "-Iproto", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, *command, "proto/generate.proto"], cwd=ROOT, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == GENERATED
    for name in GENERATED:
        assert (tmp_path / name).read_bytes() == (ROOT / "lorax_server/pb" / name).read_bytes(), "run `make proto`"


def describe_presence(field: Any) -> str:
    if field.is_repeated:
        return "*"
    in_oneof = field.containing_oneof
    return "?" if in_oneof is not None and in_oneof.name == f"_{field.name}" else ""


@pytest.mark.parametrize("name", FIELDS)
def test_field_numbers_match_lorax(name: str) -> None:
    result = pb.DESCRIPTOR.message_types_by_name[name].fields
    theirs = [f"{field.name}={field.number}{describe_presence(field)}" for field in result if field.number < OWN_FROM]
    assert " ".join(theirs) == FIELDS[name]


def test_field_types_match_lorax() -> None:
    any_field = pb.DESCRIPTOR.message_types_by_name["Image"].fields[0]
    kinds = {getattr(any_field, f"TYPE_{kind.upper()}"): kind for kind in KINDS}
    for message in FIELDS:
        for field in pb.DESCRIPTOR.message_types_by_name[message].fields:
            if field.name in TYPES:
                assert kinds[field.type] == TYPES[field.name], f"{message}.{field.name}"


def test_finish_reasons_match_lorax() -> None:
    assert dict(pb.FinishReason.items()) == {f"FINISH_REASON_{each.name}": each.value for each in FinishReason}
    assert [each.value for each in FinishReason] == [0, 1, 2]


def test_package_name_matches_lorax() -> None:
    assert pb.DESCRIPTOR.package == "generate.v1"


# --- Messages ---------------------------------------------------------------------------------------------------------


def round_trip(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def test_next_tokens_round_trip() -> None:
    alternatives = AlternativeTokens([7, 8], [-0.5, -1.25], ["a", "é"])
    tokens = NextTokens([7, 9], [math.nan, -0.5], ["a", "</s>"], [False, True], [alternatives])
    message = round_trip(tokens.to_pb())
    assert list(message.ids) == [7, 9]
    assert math.isnan(message.logprobs[0])
    assert message.logprobs[1] == -0.5
    assert list(message.texts) == ["a", "</s>"]
    assert list(message.is_special) == [False, True]
    (also,) = message.alternative_tokens
    assert (list(also.ids), list(also.logprobs), list(also.texts)) == ([7, 8], [-0.5, -1.25], ["a", "é"])
    assert len(tokens) == 2


@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1])
@pytest.mark.parametrize("reason", FinishReason)
def test_finished_text_round_trips(reason: FinishReason, seed: int | None) -> None:
    message = round_trip(GeneratedText("日本\ufffd", 3, 0, reason, seed).to_pb())
    assert (message.text, message.generated_tokens, message.skipped_tokens) == ("日本\ufffd", 3, 0)
    assert message.finish_reason == reason.value
    assert message.HasField("seed") == (seed is not None)
    assert message.seed == (seed or 0)


def test_generation_omits_unset_fields() -> None:
    tokens = NextTokens([7], [-0.5], ["a"], [False])
    first = round_trip(Generation(2**64 - 1, tokens, 5, tokens, None).to_pb())
    assert (first.request_id, first.prefill_tokens_length) == (2**64 - 1, 5)
    assert first.prefill_tokens == first.next_tokens == tokens.to_pb()
    assert not first.HasField("generated_text")
    last = round_trip(Generation(1, None, 0, tokens, GeneratedText("", 1, 0, FinishReason.LENGTH, None)).to_pb())
    assert not last.HasField("prefill_tokens")
    assert last.HasField("generated_text")
    assert last.generated_text.text == ""


def test_lorax_message_has_defaults_for_missing_fields() -> None:
    read = pb.Request.FromString(bytes.fromhex("0807 1202 6869 2003 4002"))  # fields 1, 2, 4 and 8
    assert (read.id, read.inputs, read.truncate, read.adapter_index) == (7, "hi", 3, 2)
    assert not read.tokenized_inputs.ids
    assert not read.parameters.HasField("schema")
    assert read.stopping_parameters.max_new_tokens == 0


# --- Without protobuf -------------------------------------------------------------------------------------------------

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "google" or name.startswith("google."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
STEPS = """
from types import SimpleNamespace
import torch
from lorax_server.models.causal_lm import CausalLM, CausalLMBatch
from lorax_server.models.contract.next_token_chooser import NextTokenChooser
from lorax_server.generation.stopping import StoppingCriteria
from lorax_server.types import SamplingParams, StopParams

lm = CausalLM(sys.argv[1], dtype=torch.float32)
prompts, stop = [[5, 9, 20], [7]], StopParams(max_new_tokens=4, ignore_eos=True)
requests = [SimpleNamespace(id=i, adapter_index=0, prefill_logprobs=i == 0) for i in range(2)]
choosers = [NextTokenChooser(SamplingParams(), stop, len(prompt)) for prompt in prompts]
stops = [StoppingCriteria(stop) for _ in prompts]
batch, tokens = CausalLMBatch.from_prompts(requests, prompts, choosers, stops, 0, lm.device, batch_id=3), {0: [], 1: []}
while batch is not None:
    generations, batch = lm.generate_token(batch)
    for each in generations:
        tokens[each.request_id] += each.next_tokens.token_ids
assert not any(name.startswith("google") for name in sys.modules)
print(tokens)
"""


def run_without_protobuf(code: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_protobuf_is_imported_only_for_messages() -> None:
    code = (
        "import lorax_server.models.causal_lm, lorax_server.sampling\n"
        "from lorax_server.models.contract.types import message_types\n"
        "try: message_types()\nexcept ModuleNotFoundError as error: print(error.name.split('.')[0])"
    )
    assert run_without_protobuf(code) == "google"


@pytest.mark.slow
def test_batch_runs_without_protobuf(tmp_path: Path) -> None:
    zoo = Zoo(tmp_path)
    requests = [request(i, ids, 4, stop={"ignore_eos_token": True}) for i, ids in enumerate([[5, 9, 20], [7]])]
    answers = run(zoo.served("llama"), *requests)
    expected = {i: answer.token_ids for i, answer in enumerate(answers)}
    assert run_without_protobuf(STEPS, str(zoo.folder("llama"))) == str(expected)
