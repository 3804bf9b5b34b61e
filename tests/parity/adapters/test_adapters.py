"""Each adapter kind in a single request, compared with PEFT."""

from pathlib import Path

import pytest
import torch

from tests.grids import slow_except
from tests.paged import PagedDriver
from tests.parity.adapters.cases import CASES
from tests.parity.adapters.served import load_adapters, make_model
from tests.parity.oracle import oracle_logits, oracle_text
from tests.parity.variant import VOCAB

PROMPT_LENGTH, STEPS = 11, 5
TOLERANCE = 1e-4


QUICK = {case.kind: name for name, case in reversed(CASES.items())}.values()  # the first case of each kind


@pytest.mark.parametrize("name", slow_except(QUICK, CASES))
def test_logits_and_text_match_peft(
    name: str, tmp_path: Path, device: torch.device, adapter_scores: dict[str, tuple[str, float]]
) -> None:
    case = CASES[name]
    case.write(tmp_path)
    oracle = case.oracle(tmp_path).to(device)
    model = make_model(case.base, device)
    arena = load_adapters(model, [tmp_path], device)
    ids = torch.randint(3, min(VOCAB, case.vocab), (PROMPT_LENGTH + STEPS,)).tolist()
    ids[2] = ids[PROMPT_LENGTH + 2] = case.vocab - 1  # the last added token, if any

    expected = oracle_logits(oracle, ids, PROMPT_LENGTH, {})
    driver = PagedDriver(model)
    seq = driver.add(1, PROMPT_LENGTH)
    feeds = [ids[:PROMPT_LENGTH], *([token] for token in ids[PROMPT_LENGTH:])]
    logits = torch.cat([driver.forward([(seq, feed)], arena)[0] for feed in feeds])

    assert expected.shape[1] == case.vocab
    assert logits.shape[1] == max(case.vocab, VOCAB)
    assert (logits[:, case.vocab :] == -torch.inf).all()
    difference = float((logits[:, : case.vocab] - expected).abs().max())
    adapter_scores[name] = (case.kind, difference)
    assert difference < TOLERANCE
    ours = driver.greedy(ids[:PROMPT_LENGTH], 8, arena, adapter=1)
    text = oracle_text(oracle, ids[:PROMPT_LENGTH], ours, {})
    assert ours[: len(text)] == text
    assert len(text) >= 4  # otherwise the comparison is meaningless

    # The adapter must have an effect, otherwise the comparison is meaningless.
    base = driver.forward([(driver.add(0), ids[:2])], arena)[0][:, :VOCAB]
    assert (base[:, : case.vocab] - expected[:2, :VOCAB]).abs().max() > 0.01
