"""The op table in plain torch. It runs on every device, and every other kernel is tested against it."""

from lorax_server.kernels.reference.attend import attend
from lorax_server.kernels.reference.cache import write_kv
from lorax_server.kernels.reference.decode import decode_attention
from lorax_server.kernels.reference.elementwise import layer_norm, rms_norm, rotary
from lorax_server.kernels.reference.embedding import adapt_embedding, look_up
from lorax_server.kernels.reference.linear import gated_linear, linear, make_linear, prepare
from lorax_server.kernels.reference.lora import LONG_RUN, add_lora, plan_lora, scale_and_shift
from lorax_server.kernels.reference.prefill import prefill_attention

__all__ = [
    "LONG_RUN",
    "adapt_embedding",
    "add_lora",
    "attend",
    "decode_attention",
    "gated_linear",
    "layer_norm",
    "linear",
    "look_up",
    "make_linear",
    "plan_lora",
    "prefill_attention",
    "prepare",
    "rms_norm",
    "rotary",
    "scale_and_shift",
    "write_kv",
]
