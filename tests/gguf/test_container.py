"""GGUF headers are parsed with untrusted counts, lengths and offsets."""

import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorax_server.errors import WeightsError
from lorax_server.gguf.container import MAX_ARRAY_LENGTH, MAX_ENTRIES, TENSOR_TYPES, read_gguf
from tests.gguf.writer import save

UINT32, STRING, ARRAY = 4, 8, 9
F32, Q4_0, Q4_K = 0, 2, 12
HUGE = 2**63 - 1


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def metadata(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return metadata("a", ARRAY, struct.pack("<IQ", kind, count) + content)


def tensor(name: str = "t", shape: Sequence[int] = (32,), kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def make_file(fields: Sequence[bytes] = (), tensors: Sequence[bytes] = (), *, version: int = 3, data: int = 0) -> bytes:
    content = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join([*fields, *tensors])
    return content + bytes(-len(content) % 32 + data) if data else content


def counts(tensors: int, fields: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields)


def test_file_matches_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_rope_freq_base(0.5)
    writer.add_add_bos_token(False)
    writer.add_token_list(["a", "", "ü▁"])
    writer.add_token_scores([1.0, -2.5, 0.0])
    for number, shape in enumerate([(3,), (2, 32), (5, 3, 64)]):
        writer.add_tensor(f"t{number}", np.full(shape, number, dtype=np.float16))
    save(writer)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    actual = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in ours.metadata.items()}
    assert actual == expected
    for each in theirs.tensors:
        entry = ours.tensors[each.name]
        assert (entry.shape, entry.start) == (tuple(each.shape[::-1].tolist()), each.data_offset)
        assert (entry.type.name, entry.num_bytes) == (each.tensor_type.name, each.n_bytes)


def test_tensor_types_match_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        expected = gguf.GGMLQuantizationType(number)
        assert (kind.name, kind.block, kind.num_bytes) == (expected.name, *gguf.GGML_QUANT_SIZES[expected])


INVALID = {
    "empty": (b"", "not a GGUF file"),
    "magic": (b"GGML" + bytes(100), "not a GGUF file"),
    "version": (make_file(version=1), "has GGUF version 1; only versions 2 and 3 are supported"),
    "big-endian": (make_file(version=3 << 24), r"has GGUF version 50331648 \(big-endian\)"),
    "truncated": (make_file([metadata("a", STRING, text("value"))])[:-3], "the file is truncated"),
    "count-fields": (counts(0, 5), "the file is truncated"),
    "count-tensors": (counts(7, 0), "the file is truncated"),
    "huge-fields": (counts(0, HUGE), f"at most {MAX_ENTRIES} are allowed"),
    "huge-tensors": (counts(HUGE, 0), f"at most {MAX_ENTRIES} are allowed"),
    "huge-name": (counts(0, 1) + struct.pack("<Q", HUGE), "at most 1024 are allowed"),
    "huge-text": (make_file([metadata("a", STRING, struct.pack("<Q", 2**26))]), "the file is truncated"),
    "endless-text": (make_file([metadata("a", STRING, struct.pack("<Q", HUGE))]), "a text in the header has"),
    "invalid-text": (make_file([metadata("a", STRING, text(b"\xff"))]), "not UTF-8"),
    "huge-array": (make_file([array(UINT32, HUGE)]), f"at most {MAX_ARRAY_LENGTH} are allowed"),
    "long-array": (make_file([array(UINT32, MAX_ARRAY_LENGTH)]), "the file is truncated"),
    "long-texts": (make_file([array(STRING, MAX_ARRAY_LENGTH)]), "the file is truncated"),
    "nested-array": (make_file([array(ARRAY, 3)]), "a metadata value has type 9, which is not supported"),
    "unknown-value": (make_file([metadata("a", 77, b"")]), "a metadata value has type 77"),
    "repeated-field": (make_file([metadata("a", UINT32, bytes(4))] * 2), "metadata field 'a' is duplicated"),
    "control-name": (make_file([metadata("a\n", UINT32, bytes(4))]), r"metadata field 'a\\n' has an invalid name"),
    "repeated-tensor": (make_file(tensors=[tensor()] * 2, data=256), "tensor 't' is duplicated"),
    "no-dimensions": (make_file(tensors=[tensor(shape=())]), "a tensor has 0 dimensions"),
    "many-dimensions": (make_file(tensors=[tensor(shape=(1,) * 5)]), "a tensor has 5 dimensions"),
    "huge-dimensions": (make_file(tensors=[tensor(shape=(1, HUGE))], data=256), "a F32 tensor has shape"),
    "overflow": (make_file(tensors=[tensor(shape=(2**40, 2**40, 2**40))], data=256), "it may be truncated"),
    "empty-dimension": (make_file(tensors=[tensor(shape=(0, 4))], data=256), "a F32 tensor has shape"),
    "unknown-type": (make_file(tensors=[tensor(kind=16)], data=256), "a tensor has type 16, which is not supported; "),
    "partial-block": (make_file(tensors=[tensor(shape=(48,), kind=Q4_0)], data=256), "whole blocks of 32"),
    "partial-super-block": (make_file(tensors=[tensor(shape=(288,), kind=Q4_K)], data=256), "whole blocks of 256"),
    "beyond-end": (make_file(tensors=[tensor(offset=160)], data=256), "it may be truncated"),
    "no-data": (make_file(tensors=[tensor()]), "it may be truncated"),
    "huge-offset": (make_file(tensors=[tensor(offset=2**64 - 32)], data=256), "it may be truncated"),
    "misaligned": (make_file(tensors=[tensor(offset=8)], data=256), "tensor 't' is not aligned to 32 bytes"),
    "overlapping": (
        make_file(tensors=[tensor(), tensor("u", offset=96)], data=256),
        "tensor 'u' overlaps another tensor",
    ),
    "alignment": (
        make_file([metadata("general.alignment", UINT32, struct.pack("<I", 0))]),
        "general.alignment = 0 is not a multiple of 8",
    ),
    "alignment-type": (make_file([metadata("general.alignment", STRING, text("x"))]), "general.alignment = x is not"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_header_is_rejected_in_one_sentence(name: str, tmp_path: Path) -> None:
    content, message = INVALID[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=rf"^{re.escape(str(path))}: .*{message}") as error:
        read_gguf(path)
    assert "\n" not in str(error.value)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        read_gguf(tmp_path / "a.gguf")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(position=st.integers(0, 300), replacement=st.binary(min_size=1, max_size=9))
def test_corrupted_bytes_never_crash_reader(position: int, replacement: bytes, tmp_path: Path) -> None:
    fields = [metadata("general.alignment", UINT32, struct.pack("<I", 32)), array(STRING, 2, text("a") + text("b"))]
    content = make_file(fields, [tensor(), tensor("u", (2, 32), offset=128)], data=384)
    path = tmp_path / "a.gguf"
    path.write_bytes(content[:position] + replacement + content[position + len(replacement) :])
    with suppress(WeightsError):
        read_gguf(path)


# --- Split files ---


def write_parts(folder: Path, count: int) -> list[Path]:
    paths = []
    for number in range(1, count + 1):
        path = folder / f"m-{number:05}-of-{count:05}.gguf"
        split = metadata("split.count", 2, struct.pack("<H", count))
        path.write_bytes(make_file([split], [tensor(f"t{number}")], data=128))
        paths.append(path)
    return paths


def test_split_files_are_read_together(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, 3)
    for path in paths:
        assert {name: entry.path for name, entry in read_gguf(path).tensors.items()} == {
            f"t{number}": part for number, part in enumerate(paths, start=1)
        }


def test_error_names_missing_part(tmp_path: Path) -> None:
    first, second, _ = write_parts(tmp_path, 3)
    second.unlink()
    with pytest.raises(
        WeightsError, match=r"m-00002-of-00003\.gguf: the file is missing; the model consists of 3 files"
    ):
        read_gguf(first)


def test_renamed_part_is_rejected(tmp_path: Path) -> None:
    path = write_parts(tmp_path, 2)[0].rename(tmp_path / "m.gguf")
    with pytest.raises(WeightsError, match=r"part of 2 files, which must be named NAME-00001-of-00002\.gguf"):
        read_gguf(path)


def test_tensor_in_two_parts_is_rejected(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path, 2)
    second.write_bytes(first.read_bytes())
    with pytest.raises(WeightsError, match="tensor 't1' is also in another file of the model"):
        read_gguf(first)
