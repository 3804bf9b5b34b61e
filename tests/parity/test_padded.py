"""The padded seed contract classes compared with transformers and with the paged models."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lorax_server.adapters.batch import AdapterBatchData, AdapterBatchMetadata
from lorax_server.distributed import FakeGroup
from lorax_server.errors import InputError
from lorax_server.kernels import select_ops
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.neox_modeling import GPTNeoxForCausalLM
from lorax_server.models.custom_modeling.opt_modeling import OPTForCausalLM
from lorax_server.models.registry import build_model
from lorax_server.weights import Weights
from tests.grids import slow_except
from tests.lora import make_arena, merged, random_factors
from tests.optional import present
from tests.paged import PagedDriver
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

NAMES = [name for name in VARIANTS if name.startswith(("neox", "opt", "galactica"))]
CLASSES = {"gpt_neox": GPTNeoxForCausalLM, "opt": OPTForCausalLM}
QUICK = ("neox-parallel", "neox-rope-dynamic-beyond", "opt-pre-norm", "opt-350m-like", "galactica-like")
BOTH = ["neox-parallel", "neox-sequential", "opt-pre-norm", "opt-350m-like"]
TOLERANCE = 1e-4


def make_pair(name: str, device: torch.device) -> tuple[Any, Any]:
    oracle = make_oracle(name).to(device)
    config = VARIANTS[name].config()
    with torch.no_grad():
        model = CLASSES[config.model_type](config, make_weights(checkpoint(name, oracle), device))
    return oracle, model


def left_padded(lengths: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), 2), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, 97, (length,))
        mask[row, width - length :] = 1
    return ids.to(device), mask.to(device)


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def drop_unused_positions(model: Any, **inputs: Any) -> dict[str, Any]:
    """Drop positions for OPT, which computes them from the mask."""
    if isinstance(model, OPTForCausalLM):
        inputs.pop("position_ids", None)
    return inputs


@torch.no_grad()
@pytest.mark.parametrize("name", slow_except(QUICK, NAMES))
def test_left_padded_batch_matches_single_requests_in_transformers(name: str, device: torch.device) -> None:
    """Prefill prompts of different lengths, then run 20 decode steps with the returned `past_key_values`."""
    _, model = make_pair(name, device)
    lengths = [13, 4, 9]
    ids, mask = left_padded(lengths, device)
    out = model(
        **drop_unused_positions(model, input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=True)
    )
    # Length-dependent angles also follow each row's length in padded batches, and change as it grows.
    steps = 3 if "dynamic" in name else 20
    got, fed = [out.logits], ids
    for _ in range(steps):
        token = torch.randint(3, 97, (3, 1), device=device)
        fed, mask = torch.cat([fed, token], 1), torch.cat([mask, torch.ones_like(token)], 1)
        out = model(
            **drop_unused_positions(
                model,
                input_ids=token,
                attention_mask=mask,
                position_ids=positions(mask)[:, -1:],
                past_key_values=out.past_key_values,
                use_cache=True,
            )
        )
        got.append(out.logits)
    logits = torch.cat(got, 1)
    if "dynamic" in name:
        logits, fed = logits[:, : ids.shape[1]], ids
    for row, length in enumerate(lengths):
        start = ids.shape[1] - length
        expected = make_oracle(name).to(device)(fed[row : row + 1, start:]).logits[0]
        assert (logits[row, start:] - expected).abs().max() < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", slow_except(QUICK, NAMES))
def test_padded_logits_match_paged_logits(name: str, device: torch.device) -> None:
    oracle, padded = make_pair(name, device)
    paged = PagedDriver(build_model(VARIANTS[name].config(), make_weights(checkpoint(name, oracle), device)))
    ids, mask = left_padded([12, 7], device)
    out = padded(**drop_unused_positions(padded, input_ids=ids, attention_mask=mask, position_ids=positions(mask)))
    rows = [ids[0].tolist(), ids[1, 5:].tolist()]
    first, second = paged.forward([(paged.add(), rows[0]), (paged.add(), rows[1])])
    assert (out.logits[0] - first).abs().max() < TOLERANCE
    assert (out.logits[1, 5:] - second).abs().max() < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", BOTH)
def test_multiple_new_tokens_with_past_use_causal_attention(name: str, device: torch.device) -> None:
    """Multiple new tokens with a past use causal attention, with and without an explicit mask."""
    oracle, model = make_pair(name, device)
    ids = torch.randint(3, 97, (2, 17), device=device)
    expected = oracle(ids).logits
    for mask in (None, torch.ones_like(ids)):
        first = model(input_ids=ids[:, :9], use_cache=True)
        rest = model(input_ids=ids[:, 9:], attention_mask=mask, past_key_values=first.past_key_values)
        assert (torch.cat([first.logits, rest.logits], 1) - expected).abs().max() < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", BOTH)
def test_output_fields_match_transformers(name: str, device: torch.device) -> None:
    """Compare hidden states, attentions, loss, embeddings as input, and tuples and dictionaries as output."""
    oracle, model = make_pair(name, device)
    ids = torch.randint(3, 97, (2, 11), device=device)
    labels = ids.clone()
    labels[0, :4] = -100
    asked = {"labels": labels, "output_attentions": True, "output_hidden_states": True}
    expected, out = oracle(ids, **asked), model(input_ids=ids, **asked)
    assert isinstance(out, CausalLMOutputWithPast)
    assert abs(out.loss - expected.loss) < TOLERANCE
    hidden_states, attentions = present(out.hidden_states), present(out.attentions)
    assert len(hidden_states) == len(expected.hidden_states) == 4
    assert len(attentions) == len(expected.attentions) == 3
    for ours, theirs in zip(hidden_states + attentions, expected.hidden_states + expected.attentions, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < TOLERANCE

    embeds = oracle.get_input_embeddings()(ids)
    assert (model(inputs_embeds=embeds).logits - expected.logits).abs().max() < TOLERANCE
    assert model(input_ids=ids, use_cache=False).past_key_values is None
    assert model(input_ids=ids).hidden_states is None
    as_tuple = model(input_ids=ids, labels=labels, use_cache=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert as_tuple[0] == out.loss
    assert torch.equal(as_tuple[1], present(out.logits))
    keys, values = as_tuple[2][0]
    assert keys.shape == values.shape == (2, 4, 11, model.config.hidden_size // 4)


@torch.no_grad()
@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_head_mask_scales_head_outputs(name: str, per_layer: bool, device: torch.device) -> None:
    """Masking a head is equivalent to scaling its columns in the output projection."""
    oracle, model = make_pair(name, device)
    ids = torch.randint(3, 97, (2, 11), device=device)
    mask = torch.rand(3, 4, device=device) if per_layer else torch.rand(4, device=device)
    got = model(input_ids=ids, head_mask=mask).logits
    plain = oracle(ids).logits
    projections = [m for n, m in oracle.named_modules() if n.endswith(("attention.dense", "self_attn.out_proj"))]
    for projection, row in zip(projections, mask.expand(3, -1), strict=True):
        columns = row.repeat_interleave(projection.weight.shape[1] // 4)
        projection.weight = nn.Parameter(projection.weight * columns)
    assert (got - oracle(ids).logits).abs().max() < TOLERANCE
    assert (got - plain).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("name", ["neox-parallel", "opt-pre-norm", "opt-projection"])
def test_padded_batch_with_adapters_matches_merged_models(name: str, device: torch.device) -> None:
    """Pass one adapter index per token of the padded batch, with the base model in one row."""
    oracle, model = make_pair(name, device)
    targets = collect_adapter_targets(model)
    adapters = [(random_factors(targets, 2, 0), 1.0), (random_factors(targets, 5, 1), 0.5)]
    ids = torch.randint(3, 97, (3, 10), device=device)
    rows = torch.tensor([2, 0, 1], device=device)
    meta = AdapterBatchMetadata.from_indices(rows.repeat_interleave(10))
    out = model(input_ids=ids, adapter_data=AdapterBatchData(meta, make_arena(targets, adapters, device))).logits
    oracles = [oracle, *(merged(oracle, factors, scale) for factors, scale in adapters)]
    for row, index in enumerate(rows.tolist()):
        assert (out[row] - oracles[index](ids[row : row + 1]).logits[0]).abs().max() < TOLERANCE


@torch.no_grad()
def test_neox_rope_table_grows(device: torch.device) -> None:
    oracle, model = make_pair("neox-parallel", device)
    ids = torch.randint(3, 97, (1, 150), device=device)
    assert (model(input_ids=ids).logits - oracle(ids).logits).abs().max() < TOLERANCE


@torch.no_grad()
def test_positions_and_head_mask_are_broadcast(device: torch.device) -> None:
    """Use one row of positions for all sequences, and a float32 mask with a half-precision model."""
    oracle, model = make_pair("neox-parallel", device)
    ids = torch.randint(3, 97, (2, 6), device=device)
    positions = torch.arange(3, 9, device=device)[None]
    expected = oracle(ids, position_ids=positions).logits
    assert (model(input_ids=ids, position_ids=positions).logits - expected).abs().max() < TOLERANCE
    tensors = checkpoint("neox-parallel", oracle)
    half = GPTNeoxForCausalLM(
        VARIANTS["neox-parallel"].config(),
        Weights(tensors, device=device, dtype=torch.float16, process_group=FakeGroup(), ops=select_ops(device)),
    )
    masked = model(input_ids=ids, head_mask=torch.full((4,), 0.5, device=device)).logits
    rough = half(input_ids=ids, head_mask=torch.full((4,), 0.5, device=device)).logits
    assert (masked - rough.float()).abs().max() < 0.1


@torch.no_grad()
def test_invalid_input_is_rejected(device: torch.device) -> None:
    _, model = make_pair("neox-parallel", device)
    ids = torch.randint(3, 97, (2, 5), device=device)
    with pytest.raises(ValueError, match="exactly one"):
        model(input_ids=ids, inputs_embeds=torch.zeros(2, 5, 64, device=device))
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(InputError, match=r"shape \(2, 5\) .* \(got \(2, 4\)\)"):
        model(input_ids=ids, attention_mask=torch.ones(2, 4, device=device))
    _, opt = make_pair("opt-pre-norm", device)
    with pytest.raises(InputError, match="at most 128 for this model"):
        opt(input_ids=torch.randint(3, 97, (1, 129), device=device))
    # Padding does not count: 128 tokens fit at any padded width.
    wide = torch.randint(3, 97, (1, 140), device=device)
    mask = torch.ones_like(wide)
    mask[:, :12] = 0
    assert opt(input_ids=wide, attention_mask=mask).logits.shape == (1, 140, 97)
