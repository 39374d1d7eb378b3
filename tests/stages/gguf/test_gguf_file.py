"""GGUF files: right values and bytes from right files, one clear sentence about everything else."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from struct import pack

import gguf
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.gguf.errors import GgufError, GgufUnreadable, UnsupportedModelError
from stages.gguf.file import GgufFile
from stages.gguf.tensors import TENSOR_TYPES, TensorInfo

WriteGguf = Callable[..., Path]


def add_every_type(writer: GGUFWriter) -> None:
    writer.add_uint8("t.u8", 255)
    writer.add_int8("t.i8", -128)
    writer.add_uint16("t.u16", 65_535)
    writer.add_int16("t.i16", -32_768)
    writer.add_uint32("t.u32", 2**32 - 1)
    writer.add_int32("t.i32", -(2**31))
    writer.add_float32("t.f32", 0.5)
    writer.add_bool("t.bool", True)
    writer.add_uint64("t.u64", 2**64 - 1)
    writer.add_int64("t.i64", -(2**63))
    writer.add_float64("t.f64", 0.1)
    writer.add_string("t.string", "é\n")
    writer.add_array("t.strings", ["x", "", "yy"])
    writer.add_array("t.numbers", [1, -2])


def read_everything(path: Path) -> dict[str, object]:
    with GgufFile.open(path) as file:
        for tensor in file.tensors.values():
            assert len(file.tensor_data(tensor)) == tensor.num_bytes
        return {key: file.value(key) for key in file.keys}


def problem_of(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufUnreadable) as refusal:
        read_everything(path)
    assert str(refusal.value) == f"{path}: {refusal.value.problem}"
    return refusal.value.problem


def test_every_type_is_read(tmp_path: Path, write_gguf: WriteGguf) -> None:
    values = read_everything(write_gguf(tmp_path / "types.gguf", add_every_type))
    assert {key: value for key, value in values.items() if key.startswith("t.")} == {
        "t.u8": 255,
        "t.i8": -128,
        "t.u16": 65_535,
        "t.i16": -32_768,
        "t.u32": 2**32 - 1,
        "t.i32": -(2**31),
        "t.f32": 0.5,
        "t.bool": True,
        "t.u64": 2**64 - 1,
        "t.i64": -(2**63),
        "t.f64": 0.1,
        "t.string": "é\n",
        "t.strings": ("x", "", "yy"),
        "t.numbers": (1, -2),
    }
    assert values["t.bool"] is True


def test_a_key_that_is_not_there_has_no_value(tmp_path: Path, write_gguf: WriteGguf) -> None:
    with GgufFile.open(write_gguf(tmp_path / "model.gguf")) as file:
        assert file.value("no.such.key") is None


@pytest.mark.parametrize("alignment", [32, 256])
@pytest.mark.parametrize("tensor_type", ["F32", "F16", "Q4_1", "Q8_0"])
def test_tensors_are_those_that_gguf_reads(
    tmp_path: Path, write_gguf: WriteGguf, tensor_type: str, alignment: int
) -> None:
    def align(writer: GGUFWriter) -> None:
        writer.add_custom_alignment(alignment)

    path = write_gguf(tmp_path / "model.gguf", align, tensor_type=tensor_type)
    expected = gguf.GGUFReader(path).tensors
    with GgufFile.open(path) as file:
        assert list(file.tensors) == [tensor.name for tensor in expected]
        for tensor in expected:
            info = file.tensors[tensor.name]
            assert info.dims == tuple(tensor.shape.tolist())
            assert (info.type_id, info.num_bytes) == (tensor.tensor_type, tensor.n_bytes)
            assert bytes(file.tensor_data(info)) == tensor.data.tobytes()


def test_tensor_formats_are_those_of_gguf() -> None:
    sizes = {known.value: (known.name, *gguf.GGML_QUANT_SIZES[known]) for known in gguf.GGMLQuantizationType}
    assert {type_id: tuple(known) for type_id, known in TENSOR_TYPES.items()} == sizes
    assert TensorInfo("t", 999, (1,), 0).type_name == "type 999"


def test_a_view_of_a_tensor_outlives_the_open_file(tmp_path: Path, write_gguf: WriteGguf) -> None:
    with GgufFile.open(write_gguf(tmp_path / "model.gguf")) as file:
        view = file.tensor_data(file.tensors["norm.weight"])
    assert view.cast("f").tolist() == list(range(64))


def test_opening_a_model_is_quick(model_path: Path) -> None:
    started = time.process_time()
    with GgufFile.open(model_path) as file:
        assert len(file.tensors) == 272
    assert time.process_time() - started < 0.3


def pairs(num: int, data: bytes) -> bytes:
    return pack("<4sIQQ", b"GGUF", 3, 0, num) + data


KEY = pack("<Q1s", 1, b"k")
TENSOR = pack("<Q1s", 1, b"t")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is cut short: it has 0 bytes"),
        (b"PK\x03\x04 a zip archive", r"is not a GGUF file: it starts with b'PK\x03\x04'"),
        (pack("<4sIQQ", b"GGUF", 1, 0, 0), "is GGUF version 1; only version 3 can be read"),
        (pack("<4sIQQ", b"GGUF", 2, 0, 0), "is GGUF version 2; only version 3 can be read"),
        (pack(">4sIQQ", b"GGUF", 3, 0, 0), "is a big-endian GGUF file"),
        (pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "is cut short: it has 24 bytes"),
        (pairs(1 << 60, b""), "is cut short: it has 24 bytes"),
        (pairs(1, pack("<Q", 1 << 40)), "is damaged: a key claims to be a string of 1099511627776 bytes"),
        (pairs(1, pack("<Q1s", 1, b"\xff")), "is damaged: a key at byte 24 is not UTF-8"),
        (pairs(1, KEY + pack("<I", 13)), "is damaged: 'k' has a value of type 13"),
        (pairs(1, KEY + pack("<IIQ", 9, 9, 1) * 5000), "is damaged: 'k' has a value of type 9"),
        (pairs(1, KEY + pack("<IIQ", 9, 8, 1 << 60)), "is cut short: it has 49 bytes"),
        (pairs(1, KEY + pack("<IIQQ", 9, 8, 1, 1 << 63)), "is cut short: it has 57 bytes"),
        (pairs(1, KEY + pack("<IIQ", 9, 4, 1 << 63)), "is cut short: it has 49 bytes"),
        (pairs(1, KEY + pack("<IQ1s", 8, 1, b"\xff")), "is damaged: k at byte 37 is not UTF-8"),
        (pairs(2, (KEY + pack("<IB", 0, 1)) * 2), "is damaged: it has the key 'k' twice"),
        (pairs(1, pack("<Q17sII", 17, b"general.alignment", 4, 48)), "is damaged: general.alignment is 48"),
        (pack("<4sIQQ", b"GGUF", 3, 1, 0) + TENSOR + pack("<I", 5), "is damaged: tensor 't' has 5 dimensions"),
        (pack("<4sIQQ", b"GGUF", 3, 1, 0) + TENSOR + pack("<IQ", 1, 0), "is damaged: tensor 't' has a dimension of 0"),
        (
            pack("<4sIQQ", b"GGUF", 3, 1, 0) + TENSOR + pack("<IQIQ", 1, 33, 8, 0),
            "is damaged: tensor 't' has rows of 33 elements",
        ),
        (
            pack("<4sIQQ", b"GGUF", 3, 2, 0) + (TENSOR + pack("<IQIQ", 1, 32, 8, 0)) * 2,
            "is damaged: it has the tensor 't' twice",
        ),
        (
            pack("<4sIQQ", b"GGUF", 3, 1, 0) + TENSOR + pack("<IQIQ", 1, 1 << 63, 0, 1 << 63),
            "is cut short: it has 57 bytes, tensor t ends at byte",
        ),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_with_the_reason(tmp_path: Path, data: bytes, problem: str) -> None:
    assert problem_of(tmp_path, data).startswith(problem)


def test_a_format_of_unknown_size_is_named(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(pack("<4sIQQ", b"GGUF", 3, 1, 0) + TENSOR + pack("<IQIQ", 1, 1, 99, 0))
    with pytest.raises(UnsupportedModelError, match=r"new\.gguf: tensor t is of a format not known, type 99"):
        GgufFile.open(path)


def test_missing_tensor_data_is_noticed_to_the_byte(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = write_gguf(tmp_path / "model.gguf", tensor_type="F32")  # its 1024 bytes need no padding
    whole = path.read_bytes()
    read_everything(path)
    assert problem_of(tmp_path, whole[:-1]).startswith(
        f"is cut short: it has {len(whole) - 1} bytes, tensor token_embd.weight ends at byte {len(whole)}"
    )


def test_a_file_cut_anywhere_is_refused_as_cut_short(tmp_path: Path, whole: bytes) -> None:
    for length in range(len(whole) - 64):  # the writer pads after the last tensor
        assert problem_of(tmp_path, whole[:length]).startswith("is cut short")


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_a_flipped_bit_gives_values_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    flipped = bytearray(whole)
    position = data.draw(st.integers(0, len(whole) - 1))
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flip") / "model.gguf"
    path.write_bytes(flipped)
    with suppress(GgufError):  # and nothing else
        read_everything(path)


@pytest.mark.parametrize("make", ["absent", "directory", "fifo"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, make: str) -> None:
    path = tmp_path / "model.gguf"
    if make == "directory":
        path.mkdir()
    if make == "fifo":
        os.mkfifo(path)
    with pytest.raises(GgufUnreadable, match=r"model\.gguf: (is not a file|cannot be read: No such file)"):
        GgufFile.open(path)


def test_files_are_read_without_torch_and_numpy() -> None:
    code = (
        "import sys, stages.gguf.model_files, stages.engine.config;"
        "sys.exit(bool({'torch', 'numpy', 'redis'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=60)
