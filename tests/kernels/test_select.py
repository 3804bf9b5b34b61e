import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lorax_server.kernels import reference, select_ops
from lorax_server.kernels.cpu import library
from lorax_server.kernels.cpu.ops import CpuOps


def test_cpu_uses_native_kernels() -> None:
    assert isinstance(select_ops(torch.device("cpu")), CpuOps)


def test_missing_library_falls_back_to_reference_with_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "PACKAGE_DIR", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert select_ops(torch.device("cpu")) is reference
    assert [record.getMessage() for record in caplog.records] == [
        "no native CPU kernels; using the slower torch ops: the library was not built: reinstall lorax_server with a "
        "C++ compiler and check the build errors"
    ]


def test_macos_uses_reference_with_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(library, "sys", SimpleNamespace(platform="darwin"))
    assert select_ops(torch.device("cpu")) is reference
    assert [record.getMessage() for record in caplog.records] == [
        "no native CPU kernels; using the slower torch ops: they exist only for Linux"
    ]


def test_broken_library_falls_back_to_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("neon", "avx2", "avx512"):
        (tmp_path / f"_{name}.so").write_bytes(b"no library")
    monkeypatch.setattr(library, "PACKAGE_DIR", tmp_path)
    assert select_ops(torch.device("cpu")) is reference
    assert ".so cannot be loaded" in caplog.text


def test_cpu_without_vector_instructions_falls_back_to_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX")
    monkeypatch.setattr(library, "_is_arm", lambda: False)
    assert select_ops(torch.device("cpu")) is reference
    assert "NO AVX" in caplog.text


def test_library_built_from_different_sources_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(library.PACKAGE_DIR, tmp_path / "cpu")
    with (tmp_path / "cpu" / "native" / "simd.h").open("a") as header:
        header.write("// changed")
    monkeypatch.setattr(library, "PACKAGE_DIR", tmp_path / "cpu")
    assert select_ops(torch.device("cpu")) is reference
    assert "different sources" in caplog.text
