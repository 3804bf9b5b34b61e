"""The op table in plain torch, for every device: the specification that every other kernel is tested against."""

from lorax_server.kernels.reference.attention import (
    attend,
    decode_attention,
    prefill_attention,
    rotary,
    score,
    write_kv,
)
from lorax_server.kernels.reference.linear import gated_linear, linear, look_up, make_linear, prepare
from lorax_server.kernels.reference.lora import adapt_embedding, add_lora, plan_lora, scale_and_shift
from lorax_server.kernels.reference.norm import layer_norm, rms_norm
from lorax_server.kernels.reference.sampling import choose_greedy, find_best, find_logprobs

# The properties of `Ops`.
records_graphs = False
has_fast_bfloat16 = False
max_lora_rank: int | None = None
choose_rows = None


def make_recorder(max_rows: int) -> None:
    """Return None: these ops read numbers on the host, which a recording would repeat."""


__all__ = [
    "adapt_embedding",
    "add_lora",
    "attend",
    "choose_greedy",
    "choose_rows",
    "decode_attention",
    "find_best",
    "find_logprobs",
    "gated_linear",
    "has_fast_bfloat16",
    "layer_norm",
    "linear",
    "look_up",
    "make_linear",
    "make_recorder",
    "max_lora_rank",
    "plan_lora",
    "prefill_attention",
    "prepare",
    "records_graphs",
    "rms_norm",
    "rotary",
    "scale_and_shift",
    "score",
    "write_kv",
]
