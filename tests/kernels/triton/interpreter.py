"""Triton's interpreter, which runs kernels on a CPU. `tests/conftest.py` turns it on where there is no GPU."""

import os
from typing import Any

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL_DECODE_ROWS = 40  # more tokens are a prompt there


def repair_interpreter() -> None:
    """Mend two things of Triton 3.6.

    It holds a number as an array of one element, which numpy from 2.4 on does not take for a number: loops could not
    end at a number that a kernel has loaded. And it patches its language at every call of a kernel's function, on top
    of the patches that are there: each call would be slower than the one before.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.fn.__module__.startswith("triton."):  # the patches of our kernel serve our functions
            return self.rewrite()(*args, **kwargs)
        scope = interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        finally:
            scope.restore()

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpretedFunction.__call__ = call


def cut_small_shapes() -> None:
    """Let kernels cut the interpreter's small shapes into a few parts, as they do large ones on a GPU."""
    from lorax_server.kernels.triton import decode_attention, decode_lora, embedding, ops, prompt_lora

    decode_attention.SPLIT_TOKENS = 16
    for module in (embedding, ops):
        vars(module)["DECODE_ROWS"] = SMALL_DECODE_ROWS
    decode_lora.MAX_PARTS, decode_lora.SHRINK_BYTES = 2, 32
    prompt_lora.MAX_PROGRAMS, prompt_lora.SHRINK_BYTES = 20, 32
