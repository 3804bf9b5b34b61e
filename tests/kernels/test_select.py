import logging
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from lorax_server.kernels import reference, select_ops
from lorax_server.kernels.cpu import library
from lorax_server.kernels.cpu.ops import CpuOps


def test_a_cpu_gets_native_kernels() -> None:
    assert isinstance(select_ops(torch.device("cpu")), CpuOps)


def test_without_a_library_plain_torch_serves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert select_ops(torch.device("cpu")) is reference
    assert [record.getMessage() for record in caplog.records] == [
        "there are no kernels for this CPU, plain torch is used, which is slower: they were not built: install "
        "lorax_server again, with a C++ compiler, and read its errors"
    ]


def test_a_broken_library_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("neon", "avx2", "avx512"):
        (tmp_path / f"_{name}{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"no library")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert select_ops(torch.device("cpu")) is reference
    assert ".so cannot be used" in caplog.text


def test_a_cpu_without_vectors_gets_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX")
    monkeypatch.setattr(library, "_is_arm", lambda: False)
    assert select_ops(torch.device("cpu")) is reference
    assert "NO AVX" in caplog.text


def test_a_library_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(library.FOLDER, tmp_path / "cpu")
    with (tmp_path / "cpu" / "native" / "simd.h").open("a") as header:
        header.write("// changed")
    monkeypatch.setattr(library, "FOLDER", tmp_path / "cpu")
    assert select_ops(torch.device("cpu")) is reference
    assert "other sources" in caplog.text
