"""Tests that loading the library checks all declarations."""

import ctypes
from collections.abc import Mapping

import pytest

from lorax_server.kernels.cpu import abi
from lorax_server.kernels.cpu.abi import AbiError
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.structs import Lora

GATE = abi.FUNCTIONS["gate"]


@pytest.mark.parametrize(
    "wrong",
    [
        GATE.replace("int64_t dtype, int64_t kind", "int64_t kind, int64_t dtype"),
        GATE.replace("int64_t stride, void* out", "void* out, int64_t stride"),
        GATE.replace(", int64_t width", ""),
        GATE + ", int64_t more",
        GATE.replace("int64_t rows", "float rows"),
    ],
    ids=["swapped arguments of one type", "swapped arguments", "too few", "too many", "another type"],
)
def test_signature_mismatch_raises_abi_error(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(abi.FUNCTIONS, "gate", wrong)
    with pytest.raises(AbiError, match=r"`gate` is declared as .* in C[+][+], but as .* in Python"):
        Library()


def test_field_mismatch_raises_abi_error(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = abi.STRUCTS["Matrix"].replace("int64_t outputs; int64_t inputs;", "int64_t inputs; int64_t outputs;")
    monkeypatch.setitem(abi.STRUCTS, "Matrix", swapped)
    with pytest.raises(AbiError, match="`Matrix` is declared as"):
        Library()


@pytest.mark.parametrize(("enum", "member"), [("Dtype", "FLOAT16"), ("ActivationKind", "SILU"), ("Field", "FIELDS")])
def test_enum_mismatch_raises_abi_error(enum: str, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members: Mapping[str, int] = {**abi.ENUMS[enum], member: 77}
    monkeypatch.setitem(abi.ENUMS, enum, members)
    with pytest.raises(AbiError, match=rf"`{enum}.{member}` is .* in C[+][+], but 77 in Python"):
        Library()


def test_structs_match_declarations() -> None:
    assert [name for name, *_ in Lora._fields_][:3] == ["buffer", "table", "scales"]
    assert ctypes.sizeof(Lora) == 9 * 8
    assert dict(abi.struct_fields("Matrix"))["stored"] is ctypes.c_int32
