"""LoRAX's `NextTokenChooser`, which samples tokens for one sequence (see docs/seed-contract.md)."""

from typing import Any

import torch

from lorax_server.errors import InputError
from lorax_server.sampling.sampler import History, Sampler, SamplerOutput, SequenceSampling
from lorax_server.types import SamplingParams, StopParams


class NextTokenChooser:
    """Chooses the next token of one request: its sampling parameters and prompt length. Calling it samples a token."""

    def __init__(self, params: SamplingParams, stop: StopParams | None = None, prompt_length: int = 0) -> None:
        self.params = params
        self.sequence_sampling = (
            SequenceSampling(params) if stop is None else SequenceSampling.from_params(params, stop)
        )
        self.prompt_length = prompt_length

    @classmethod
    def from_pb(cls, pb: Any, stop: StopParams | None = None, prompt_length: int = 0) -> "NextTokenChooser":
        """Create a chooser from a `NextTokenChooserParameters` message."""
        return cls(params_from_pb(pb), stop, prompt_length)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> SamplerOutput:
        """Sample a token. `scores` is `[1, vocabulary]`; `input_ids`, `[1, tokens]`, is prompt plus completion."""
        length, prompt_length = torch.tensor([[input_ids.shape[1]], [self.prompt_length]], device=scores.device)
        sampler = Sampler([self.sequence_sampling], scores.shape[-1], scores.device)
        return sampler(scores, History(length, prompt_length, input_ids))


def params_from_pb(pb: Any) -> SamplingParams:
    """Return protobuf sampling parameters as `SamplingParams`.

    Proto3 cannot distinguish 0 from an unset field, so an invalid 0 selects the default. As in LoRAX, any sampling
    parameter that differs from its default turns sampling on.
    """
    if getattr(pb, "schema", ""):
        raise InputError("`schema`: structured output is not supported yet")
    top_p, typical_p = pb.top_p or 1.0, pb.typical_p or 1.0
    do_sample = (
        pb.do_sample or pb.temperature not in (0, 1) or pb.top_k > 0 or top_p < 1 or typical_p < 1 or pb.min_p > 0
    )
    return SamplingParams(
        do_sample=do_sample,
        temperature=pb.temperature,
        top_k=pb.top_k,
        top_p=top_p,
        min_p=pb.min_p,
        typical_p=typical_p,
        repetition_penalty=pb.repetition_penalty or 1.0,
        frequency_penalty=pb.frequency_penalty,
        presence_penalty=pb.presence_penalty,
        logit_bias={entry.token_id: entry.bias for entry in pb.logit_bias},
        watermark=pb.watermark,
        seed=pb.seed,
        num_alternatives=pb.return_k_alternatives,
        raw_logprobs=pb.raw_logprobs,
    )
