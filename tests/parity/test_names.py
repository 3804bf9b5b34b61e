"""Checkpoints as people store them: without the first word of their names, and a tied matrix under the head's name."""

import pytest
import torch

from lorax_server.models.registry import build_model
from tests.paged import PagedDriver
from tests.parity.relatives import RELATIVES
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

CPU = torch.device("cpu")
IDS = [5, 9, 33, 60, 7, 7, 81, 12]


def run(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    driver = PagedDriver(build_model(VARIANTS[name].config(), make_weights(tensors, CPU)))
    return driver.forward([(driver.add(), IDS)])[0]


@pytest.mark.parametrize("name", [name for name in RELATIVES if "-" not in name])
def test_names_of_other_checkpoints(name: str) -> None:
    tensors = checkpoint(name, make_oracle(name))
    expected = run(name, tensors)
    short = {key.removeprefix("model.").removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    assert short.keys() != tensors.keys()
    assert torch.equal(run(name, short), expected)
    if "lm_head.weight" in tensors:
        return
    (embedding,) = (
        key for key in tensors if key.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))
    )
    renamed = {"lm_head.weight" if key == embedding else key: tensor for key, tensor in tensors.items()}
    assert torch.equal(run(name, renamed), expected)
