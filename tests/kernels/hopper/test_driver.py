"""Launching kernels from several threads, with a fake driver."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="needs cuda-core")
from cuda.bindings.driver import CUresult

from lorax_server.kernels.hopper import driver

NUM_LAUNCHES = 200


class SlowConfig(SimpleNamespace):
    """A launch config that lets other threads run after each assignment."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        time.sleep(1e-5)


def test_threads_do_not_change_the_grids_of_other_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, int]] = []

    def launch(config: Any, function: Any, pointers: int, extra: int) -> tuple[int]:
        address = ctypes.c_size_t.from_address(pointers).value
        launched.append((config.gridDimX, ctypes.c_int.from_address(address).value))
        return (CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(driver, "driver", SimpleNamespace(cuLaunchKernelEx=launch, CUresult=CUresult))
    monkeypatch.setattr(driver.Kernel, "__init__", lambda _: None)
    kernel: Any = driver.Kernel()  # type: ignore[call-arg]
    kernel._index, kernel._function, kernel._lock = 0, None, threading.Lock()
    kernel._configs = [SlowConfig(), SlowConfig()]

    def launch_often(blocks: int) -> None:
        for _ in range(NUM_LAUNCHES):
            kernel.launch(blocks, 32, [(ctypes.c_int * 1)(blocks)], early=False)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(launch_often, (1, 2)))
    assert len(launched) == 2 * NUM_LAUNCHES
    assert all(grid == argument for grid, argument in launched)
