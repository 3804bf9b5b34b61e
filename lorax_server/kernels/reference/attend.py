"""Attention as a whole, in its steps."""

import torch

from lorax_server.kernels.ops import AttentionSpec, CosSin, LayerCache, PagedBatch
from lorax_server.kernels.reference.cache import write_kv
from lorax_server.kernels.reference.decode import decode_attention
from lorax_server.kernels.reference.elementwise import rotary
from lorax_server.kernels.reference.prefill import prefill_attention
from lorax_server.kernels.steps import attend_in_steps


class _Steps:
    rotary = staticmethod(rotary)
    write_kv = staticmethod(write_kv)
    decode_attention = staticmethod(decode_attention)
    prefill_attention = staticmethod(prefill_attention)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: CosSin | None,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> torch.Tensor:
    return attend_in_steps(_Steps(), q, k, v, angles, cache, batch, spec)
