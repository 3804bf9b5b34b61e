"""`CausalLMBatch` fields after `from_pb`, `filter` and `concatenate`."""

import copy
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from lorax_server.errors import AdapterError, InputError
from lorax_server.generation.stopping import FinishReason
from lorax_server.models.causal_lm import CausalLM, CausalLMBatch
from lorax_server.models.contract.types import Batch, TokenizerManager
from lorax_server.pb import generate_pb2 as pb
from tests.models.driving import Driver, batch_of, request, run
from tests.models.tiny import BOS_ID, VOCAB, Zoo, make_tokenizer
from tests.optional import present

LONG, SHORT, ONE = [5, 9, 20, 33, 41], [7, 8], [250]


@pytest.fixture(scope="session")
def lm(zoo: Zoo) -> CausalLM:
    return zoo.served("llama")


def ids_of(batch: CausalLMBatch) -> list[int]:
    return [each.id for each in batch.requests]


def three(lm: CausalLM) -> CausalLMBatch:
    return batch_of(lm, request(0, LONG, 4), request(1, SHORT, 6), request(2, ONE, 3), batch_id=7)


# --- Contract ---------------------------------------------------------------------------------------------------------


def test_batch_fields_match_contract_order() -> None:
    assert [field.name for field in fields(CausalLMBatch)] == [
        "batch_id",
        "requests",
        "requests_idx_mapping",
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "all_input_ids",
        "input_lengths",
        "prefix_offsets",
        "read_offsets",
        "next_token_choosers",
        "stopping_criterias",
        "adapter_meta",
        "max_input_length",
        "padding_right_offset",
        "max_tokens",
        "keys_head_dim_last",
    ]
    defaults = {field.name: field.default for field in fields(CausalLMBatch) if field.default is not MISSING}
    assert defaults == {"keys_head_dim_last": True}
    assert issubclass(CausalLMBatch, Batch)


def test_contract_import_paths_exist(lm: CausalLM) -> None:
    assert lm.batch_type is CausalLMBatch


# --- from_pb ----------------------------------------------------------------------------------------------------------


def test_prompts_are_padded_on_the_left(lm: CausalLM) -> None:
    batch, pad = three(lm), lm.tokenizer.pad_token_id
    assert batch.input_ids.tolist() == [LONG, [pad] * 3 + SHORT, [pad] * 4 + ONE]
    assert batch.input_lengths == [5, 2, 1]
    assert batch.max_input_length == 5
    assert [ids.tolist() for ids in batch.all_input_ids] == [[[i] for i in ids] for ids in (LONG, SHORT, ONE)]
    assert batch.past_key_values is None
    assert batch.requests_idx_mapping == {0: 0, 1: 1, 2: 2}
    assert batch.batch_id == 7
    assert len(batch) == 3


def test_mask_has_columns_for_future_tokens(lm: CausalLM) -> None:
    batch = three(lm)
    assert batch.padding_right_offset == 6
    assert batch.attention_mask.tolist() == [
        [1, 1, 1, 1, 1, *[0] * 6],
        [0, 0, 0, 1, 1, *[0] * 6],
        [0, 0, 0, 0, 1, *[0] * 6],
    ]
    assert batch.max_tokens == 3 * (5 + 6)


def test_positions_start_at_first_token(lm: CausalLM) -> None:
    assert three(lm).position_ids.tolist() == [[0, 1, 2, 3, 4], [1, 1, 1, 0, 1], [1, 1, 1, 1, 0]]


def test_text_continues_the_prompt(lm: CausalLM) -> None:
    batch = three(lm)
    assert batch.read_offsets == batch.input_lengths
    assert batch.prefix_offsets == [0, 0, 0]


def test_adapter_meta_covers_all_input_ids(lm: CausalLM) -> None:
    message = pb.Batch(
        requests=[
            request(0, LONG, fields={"adapter_index": 2}),
            request(1, SHORT, fields={"adapter_index": 2}),
            request(2, ONE),
        ]
    )
    batch = CausalLMBatch.from_pb(
        message, lm.tokenizer, TokenizerManager(), None, None, torch.float32, torch.device("cpu")
    )
    meta = batch.adapter_meta
    assert meta.adapter_indices.tolist() == [2] * 10 + [0] * 5
    assert (meta.adapter_segments, meta.segment_indices) == ([0, 10, 15], [2, 0])
    kept = batch.filter([2, 1])
    assert kept is not None
    assert kept.adapter_meta.adapter_indices.tolist() == [0, 0, 2, 2]

    batch = Driver(lm).start(request(0, LONG), request(1, SHORT))
    assert batch.adapter_meta.adapter_indices.tolist() == [0, 0]
    assert batch.adapter_meta.adapter_segments == [0, 2]


def test_token_ids_take_precedence_over_text(lm: CausalLM) -> None:
    carried = request(0, LONG)
    carried.inputs = "hello hello"
    batch = batch_of(lm, carried, request(1, "hello hello"))
    assert batch.all_input_ids[0][:, 0].tolist() == LONG
    assert batch.all_input_ids[1][:, 0].tolist() == lm.tokenizer("hello hello")["input_ids"]


def test_truncate_keeps_last_tokens_per_request(lm: CausalLM) -> None:
    texts = [request(i, "the quick brown fox", fields={"truncate": truncate}) for i, truncate in enumerate((0, 3, 1))]
    batch = batch_of(lm, *texts, request(3, LONG, fields={"truncate": 2}), request(4, SHORT, fields={"truncate": 9}))
    full = lm.tokenizer("the quick brown fox")["input_ids"]
    prompts = [ids[:, 0].tolist() for ids in batch.all_input_ids]
    assert prompts == [full, full[-3:], full[-1:], LONG[-2:], SHORT]


def test_adapter_tokenizer_tokenizes_its_requests(lm: CausalLM) -> None:
    own, other = make_tokenizer(eos_token="t", pad_token="<s>"), make_tokenizer(eos_token=None)
    tokenizers = TokenizerManager()
    tokenizers.add_tokenizer(3, other)
    tokenizers.add_tokenizer(4, own)
    message = pb.Batch(
        requests=[request(i, "hello", fields={"adapter_index": adapter}) for i, adapter in enumerate((0, 3, 4))]
    )
    batch = CausalLMBatch.from_pb(message, lm.tokenizer, tokenizers, None, None, torch.float32, torch.device("cpu"))
    assert [ids[:, 0].tolist() for ids in batch.all_input_ids[1:]] == [
        each("hello")["input_ids"] for each in (other, own)
    ]
    eos = [stop.params.eos_token_ids for stop in batch.stopping_criterias]
    assert eos == [{lm.tokenizer.eos_token_id}, frozenset(), {own.eos_token_id}]


def test_prompts_are_unlimited_without_config(lm: CausalLM) -> None:
    message = pb.Batch(requests=[request(0, [99_999] * 500)])
    batch = CausalLMBatch.from_pb(message, lm.tokenizer, lm.tokenizers, None, None, torch.float32, torch.device("cpu"))
    assert batch.max_input_length == 500


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(5, ""), "request 5: `inputs` cannot be empty"),
        (request(5, [5] * 121, 8), "request 5: `inputs` tokens [+] `max_new_tokens` must be <= 128. Given: 121"),
        (request(5, [5], 128), "request 5: .* Given: 1 `inputs` tokens and 128 `max_new_tokens`"),
        (request(5, [5, 300]), "request 5: token ID 300 is outside the model's vocabulary of 300"),
        (request(5, [5], 0), "request 5: `max_new_tokens` must be strictly positive"),
        (request(5, [5], stop={"stop_sequences": [""]}), "request 5: `stop` must not contain empty strings"),
        (request(5, [5], temperature=-1), "request 5: `temperature` must be non-negative"),
        (request(5, [5], schema="{}"), "request 5: `schema`"),
        (request(5, [5], repetition_penalty=1e-40), "request 5: `repetition_penalty` must be >= 0.001"),
        (request(5, [5], logit_bias=[pb.LogitBias(token_id=1, bias=1e30)]), "request 5: `logit_bias` of token 1"),
        (
            request(5, [5], stop={"min_new_tokens": 2, "stop_token_ids": range(VOCAB)}),
            "request 5: `min_new_tokens`: every token",
        ),
        (request(5, [5], adapter_id="my/adapter"), "request 5: adapter 'my/adapter' is not loaded"),
        (request(5, [5], fields={"cache_len": 1}), "request 5: cached prefixes and chunked prefill are not supported"),
    ],
)
def test_invalid_request_error_names_request(lm: CausalLM, bad: pb.Request, message: str) -> None:
    with pytest.raises((InputError, AdapterError), match=message) as refused:
        batch_of(lm, request(0), bad)
    assert refused.value.request_ids == (5,)


def test_empty_prompt_is_rejected_despite_bos_token(lm: CausalLM) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    assert tokenizer("")["input_ids"] == [BOS_ID]
    message = pb.Batch(requests=[request(0, "")])
    with pytest.raises(InputError, match="`inputs` cannot be empty"):
        CausalLMBatch.from_pb(message, tokenizer, lm.tokenizers, None, lm.config, lm.dtype, lm.device)


def test_duplicate_request_ids_are_rejected(lm: CausalLM) -> None:
    with pytest.raises(ValueError, match="request IDs in a batch must be unique"):
        batch_of(lm, request(3), request(3))


def test_default_limit_applies_without_model_limit(zoo: Zoo) -> None:
    with pytest.raises(InputError, match="must be <= 131072"):
        batch_of(zoo.served("bloom"), request(0, [5], 4_000_000_000))


def test_batches_from_different_models_cannot_merge(zoo: Zoo) -> None:
    batches = []
    for i, name in enumerate(("llama", "gpt2")):
        driver = Driver(zoo.served(name))
        batches.append(driver.start(request(i)))
    with pytest.raises(ValueError, match="batches from different models"):
        CausalLMBatch.concatenate(batches)
    assert all(batch.past_key_values for batch in batches)  # the batch is unchanged


def test_images_are_rejected(lm: CausalLM) -> None:
    image = request(5, LONG)
    image.tokenized_inputs.input_chunks.add().image.data = b"png"
    with pytest.raises(InputError, match="request 5: images and other input chunks are not supported"):
        batch_of(lm, image)


def test_prompt_at_length_limit_completes(zoo: Zoo) -> None:
    for name in ("gpt2", "llama", "mpt"):
        (output,) = run(zoo.served(name), request(0, [5] * 120, 8, stop={"ignore_eos_token": True}))
        assert output.end is not None
        assert output.end.generated_tokens == 8


def test_to_pb_describes_batch(lm: CausalLM) -> None:
    batch = three(lm)
    assert batch.to_pb() == pb.CachedBatch(id=7, request_ids=[0, 1, 2], size=3, max_tokens=33, current_tokens=15)
    batch = Driver(lm).steps(batch, 1)
    assert batch.to_pb() == pb.CachedBatch(id=7, request_ids=[0, 1, 2], size=3, max_tokens=33, current_tokens=18)


# --- After a step -----------------------------------------------------------------------------------------------------


def test_step_advances_all_fields_by_one(lm: CausalLM) -> None:
    batch, driver = three(lm), Driver(lm)
    batch = driver.steps(batch, 1)
    first = [driver.outputs[i].token_ids for i in range(3)]
    assert batch.input_ids.tolist() == first
    assert batch.position_ids.tolist() == [[5], [2], [1]]
    assert batch.attention_mask.tolist() == [
        [1, 1, 1, 1, 1, 1, *[0] * 5],
        [0, 0, 0, 1, 1, 1, *[0] * 5],
        [0, 0, 0, 0, 1, 1, *[0] * 5],
    ]
    assert (batch.max_input_length, batch.padding_right_offset) == (6, 5)
    assert batch.input_lengths == [6, 3, 2]
    assert batch.past_key_values is not None
    assert [part.shape for past in batch.past_key_values for part in past] == [(3, 2, 5, 8)] * 4
    batch = driver.steps(batch, 1)
    assert batch.input_ids.shape == batch.position_ids.shape == (3, 1)
    assert batch.past_key_values is not None
    assert batch.past_key_values[0][0].shape == (3, 2, 6, 8)


def test_finished_request_returns_no_tokens_until_filtered(lm: CausalLM) -> None:
    driver, batch = Driver(lm), three(lm)
    for _ in range(5):
        following = driver.step(batch, keep_finished=True)
        assert following is not None
        batch = following
    assert ids_of(batch) == [0, 1, 2]
    assert [len(driver.outputs[i].token_ids) for i in range(3)] == [4, 5, 3]
    generations, following = lm.generate_token(batch)
    assert [each.request_id for each in generations] == [1]
    assert following is None


def test_finished_batch_returns_no_generations(lm: CausalLM) -> None:
    batch = three(lm)
    for _ in range(3):
        _, following = lm.generate_token(batch)
        assert following is not None
    kept = present(following).filter([2])
    assert kept is not None
    assert lm.generate_token(kept) == ([], None)


@pytest.mark.parametrize("name", ["codegen", "gpt-j", "gpt2", "llama", "opt"])
def test_finished_request_at_limit_does_not_block_batch(name: str, zoo: Zoo) -> None:
    lm, endless = zoo.served(name), {"ignore_eos_token": True}
    driver = Driver(lm)
    batch: Any = batch_of(lm, request(0, [20] * 120, 8, stop=endless), request(1, SHORT, 30, stop=endless))
    while batch is not None:
        batch = driver.step(batch, keep_finished=True)
    assert driver.outputs[1].token_ids == run(lm, request(1, SHORT, 30, stop=endless))[0].token_ids


# --- filter -----------------------------------------------------------------------------------------------------------


def test_filter_with_all_requests_returns_same_batch(lm: CausalLM) -> None:
    batch = three(lm)
    mask = batch.attention_mask
    assert batch.filter([0, 1, 2]) is batch
    assert batch.attention_mask is mask


def test_filter_without_requests_returns_none(lm: CausalLM) -> None:
    assert three(lm).filter([]) is None


@pytest.mark.parametrize("wrong", [[3], [0, 3], [1, 1], [0, 1, 2, 2]])
def test_filter_rejects_unknown_and_duplicate_ids(lm: CausalLM, wrong: list[int]) -> None:
    batch = three(lm)
    with pytest.raises(ValueError, match=r"request_ids must be distinct IDs from this batch \[0, 1, 2\]"):
        batch.filter(wrong)
    assert ids_of(batch) == [0, 1, 2]
    assert len(batch.input_ids) == 3


def test_filter_before_first_step_removes_padding(lm: CausalLM) -> None:
    batch = three(lm).filter([2, 1])
    assert batch is not None
    assert batch.input_ids.tolist() == [[lm.tokenizer.pad_token_id, 250], SHORT]
    assert batch.position_ids.tolist() == [[1, 0], [0, 1]]
    assert batch.attention_mask.tolist() == [[0, 1, *[0] * 6], [1, 1, *[0] * 6]]
    assert (batch.max_input_length, batch.padding_right_offset, batch.max_tokens) == (2, 6, 16)
    assert batch.requests_idx_mapping == {2: 0, 1: 1}
    driver = Driver(lm)
    driver.finish(batch)
    assert driver.outputs[1].token_ids == run(lm, request(1, SHORT, 6))[0].token_ids


@pytest.mark.parametrize("kept", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [2, 0], [2, 1, 0], [1, 0, 2]])
def test_filter_keeps_all_fields_of_remaining_requests(lm: CausalLM, kept: list[int]) -> None:
    batch = Driver(lm).steps(three(lm), 2)
    before = copy.deepcopy(batch)
    after = batch.filter(list(kept))
    assert after is batch
    assert ids_of(batch) == kept
    lengths = [before.input_lengths[i] for i in kept]
    width, room = max(lengths), max(before.stopping_criterias[i].remaining_tokens for i in kept)
    assert batch.input_lengths == lengths
    assert (batch.max_input_length, batch.padding_right_offset) == (width, room)
    assert batch.max_tokens == len(kept) * (width + room)
    assert batch.attention_mask.shape == (len(kept), width + room)
    assert torch.equal(batch.attention_mask[:, :width], before.attention_mask[kept, 7 - width : 7])
    assert not batch.attention_mask[:, width:].any()
    assert torch.equal(batch.input_ids, before.input_ids[kept])
    assert torch.equal(batch.position_ids, before.position_ids[kept])
    assert [ids.tolist() for ids in batch.all_input_ids] == [before.all_input_ids[i].tolist() for i in kept]
    assert len(batch.adapter_meta.adapter_indices) == len(kept)
    assert batch.past_key_values is not None
    assert before.past_key_values is not None
    for past, past_before in zip(batch.past_key_values, before.past_key_values, strict=True):
        for part, part_before in zip(past, past_before, strict=True):
            assert torch.equal(part, part_before[kept, :, part_before.shape[2] - (width - 1) :])


def test_finished_request_reserves_no_columns(lm: CausalLM) -> None:
    """Counting the finished request's remaining tokens would shift all masks."""
    (alone,) = run(lm, request(0, LONG, 30))
    driver = Driver(lm)
    ending = request(0, LONG, 30, stop={"stop_token_ids": alone.token_ids[:1]})
    batch: Any = batch_of(lm, ending, request(1, SHORT, 10), request(2, ONE, 10))
    for _ in range(3):
        batch = driver.step(batch, keep_finished=True)
    batch = batch.filter([0, 1])
    assert batch.padding_right_offset == 7
    assert batch.attention_mask.shape[1] == batch.max_input_length + 7
    while batch is not None:
        batch = driver.step(batch, keep_finished=True)
    assert driver.outputs[1].token_ids == run(lm, request(1, SHORT, 10))[0].token_ids
    assert driver.outputs[0].end is not None
    assert driver.outputs[0].end.finish_reason is FinishReason.STOP_SEQUENCE


# --- concatenate ------------------------------------------------------------------------------------------------------


def test_merged_batches_are_right_aligned(lm: CausalLM) -> None:
    driver = Driver(lm)
    batches = [
        driver.steps(batch_of(lm, request(2, ONE, 9), batch_id=5), 1),
        driver.steps(batch_of(lm, request(0, LONG, 6), request(1, SHORT, 6), batch_id=4), 3),
        driver.steps(batch_of(lm, request(3, [9] * 7, 4), batch_id=3), 1),
    ]
    before = copy.deepcopy(batches)
    joined = CausalLMBatch.concatenate(batches)
    assert joined.batch_id == 5
    assert ids_of(joined) == [2, 0, 1, 3]
    assert joined.requests_idx_mapping == {2: 0, 0: 1, 1: 2, 3: 3}
    assert joined.input_lengths == [2, 8, 5, 8]
    assert (joined.max_input_length, joined.padding_right_offset) == (8, 8)
    assert joined.max_tokens == 4 * 16
    assert joined.attention_mask.tolist() == [
        [0] * (8 - length) + [1] * length + [0] * 8 for length in joined.input_lengths
    ]
    assert joined.position_ids.tolist() == [[1], [7], [4], [7]]
    assert torch.equal(joined.input_ids, torch.cat([batch.input_ids for batch in before]))
    assert joined.adapter_meta.adapter_indices.tolist() == [0] * 4
    assert joined.past_key_values is not None
    for layer, past in enumerate(joined.past_key_values):
        for i, part in enumerate(past):
            assert part.shape == (4, 2, 7, 8)
            row = 0
            for batch in before:
                assert batch.past_key_values is not None
                own = batch.past_key_values[layer][i]
                assert torch.equal(part[row : row + len(own), :, 7 - own.shape[2] :], own)
                assert not part[row : row + len(own), :, : 7 - own.shape[2]].any()
                row += len(own)
    assert all(batch.past_key_values is None for batch in batches)  # let go of


def test_single_batch_can_be_merged_and_continues(lm: CausalLM) -> None:
    driver = Driver(lm)
    driver.finish(CausalLMBatch.concatenate([driver.steps(three(lm), 1)]))
    assert driver.outputs[1].token_ids == run(lm, request(1, SHORT, 6))[0].token_ids


def test_batch_before_first_step_cannot_merge(lm: CausalLM) -> None:
    started = Driver(lm).start(request(9))
    with pytest.raises(ValueError, match="first step"):
        CausalLMBatch.concatenate([started, three(lm)])
    assert started.past_key_values is not None  # the other batch is still usable


def test_duplicate_request_ids_cannot_merge(lm: CausalLM) -> None:
    batches = [Driver(lm).start(request(9)) for _ in range(2)]
    with pytest.raises(ValueError, match="must be unique"):
        CausalLMBatch.concatenate(batches)


def test_batches_with_different_key_layouts_cannot_merge(lm: CausalLM) -> None:
    batches = [Driver(lm).start(request(i)) for i in range(2)]
    batches[0].keys_head_dim_last = False
    with pytest.raises(ValueError, match="layouts"):
        CausalLMBatch.concatenate(batches)


# --- Transposed key layout --------------------------------------------------------------------------------------------

HEADS, SIZE = 2, 3


def hand_made(lm: CausalLM, ids: list[int], folded: bool) -> CausalLMBatch:
    """Create a batch after its first step, with keys [rows, heads, size, columns], or [rows * heads, ...] if folded."""
    prompts = {0: LONG, 1: SHORT, 2: ONE}
    batch = Driver(lm).start(*(request(i, prompts[i]) for i in ids))
    columns = batch.max_input_length - 1
    keys = torch.randn(len(ids), HEADS, SIZE, columns)
    values = torch.randn(len(ids), HEADS, columns, SIZE)
    if folded:
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    batch.past_key_values = [(keys, values)]
    batch.keys_head_dim_last = False
    return batch


def unfolded(batch: CausalLMBatch) -> tuple[torch.Tensor, torch.Tensor]:
    assert batch.past_key_values is not None
    keys, values = batch.past_key_values[0]
    rows = len(batch)
    return keys.reshape(rows, HEADS, SIZE, -1), values.reshape(rows, HEADS, -1, SIZE)


@pytest.mark.parametrize("folded", [False, True])
def test_filter_supports_transposed_keys(lm: CausalLM, folded: bool) -> None:
    batch = hand_made(lm, [0, 1, 2], folded)
    keys, values = unfolded(batch)
    kept = batch.filter([2, 1])
    assert kept is not None
    assert kept.past_key_values is not None
    assert torch.equal(kept.past_key_values[0][0], keys[[2, 1], :, :, -2:])
    assert torch.equal(kept.past_key_values[0][1], values[[2, 1], :, -2:])
    assert not kept.keys_head_dim_last


@pytest.mark.parametrize("folded", [False, True])
def test_concatenate_supports_transposed_keys(lm: CausalLM, folded: bool) -> None:
    batches = [hand_made(lm, [1], folded), hand_made(lm, [0, 2], folded)]
    (short_keys, short_values), (keys, values) = map(unfolded, batches)
    joined = CausalLMBatch.concatenate(batches)
    assert joined.past_key_values is not None
    pad = torch.nn.functional.pad
    assert torch.equal(joined.past_key_values[0][0], torch.cat([pad(short_keys, (3, 0)), keys]))
    assert torch.equal(joined.past_key_values[0][1], torch.cat([pad(short_values, (0, 0, 3, 0)), values]))
    assert not joined.keys_head_dim_last
    assert joined.filter([2, 1]) is not None  # a joined batch can be filtered
    assert joined.past_key_values[0][0].shape == (2, HEADS, SIZE, 2)


def test_folded_heads_with_standard_layout_are_supported(lm: CausalLM) -> None:
    batch = Driver(lm).steps(three(lm), 1)
    before = copy.deepcopy(batch)
    assert batch.past_key_values is not None
    batch.past_key_values = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in batch.past_key_values]
    driver = Driver(lm)
    kept, expected = batch.filter([1, 0]), before.filter([1, 0])
    driver.finish(kept)
    assert expected is not None
    assert expected.past_key_values is not None
    reference = Driver(lm)
    reference.finish(expected)
    assert driver.outputs[1].token_ids == reference.outputs[1].token_ids
