"""Triton's interpreter, which runs kernels on a CPU."""

import os
from typing import Any

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def accept_numpy() -> None:
    """Let loops end at numbers that a kernel has loaded.

    Triton 3.6 holds a number as an array of one element, which numpy from 2.4 on does not take for a number.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
