"""Setup for Triton's interpreter, which runs kernels on a CPU. `tests/conftest.py` enables it without a GPU."""

import os
from typing import Any

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL_DECODE_ROWS = 40  # in the interpreter


def patch_interpreter() -> None:
    """Work around two problems in Triton 3.6.

    Scalars are arrays with one element, which NumPy 2.4 and later reject as loop bounds. And every call of a device
    function patches the language again on top of earlier patches, so calls become slower and slower.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.fn.__module__.startswith("triton."):  # device functions use the kernel's patches
            return self.rewrite()(*args, **kwargs)
        scope = interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        finally:
            scope.restore()

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpretedFunction.__call__ = call


def use_small_tiles() -> None:
    """Use small tiles, so the interpreter's small shapes also have several parts and splits."""
    from lorax_server.kernels.triton import decode_attention, decode_lora, embedding, ops, prompt_lora

    decode_attention.SPLIT_TOKENS = 16
    for module in (embedding, ops):
        vars(module)["DECODE_ROWS"] = SMALL_DECODE_ROWS
    decode_lora.MAX_PARTS, decode_lora.SHRINK_BYTES = 2, 32
    prompt_lora.MAX_PROGRAMS, prompt_lora.SHRINK_BYTES = 20, 32
