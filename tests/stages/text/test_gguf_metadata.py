"""The metadata reader: right values from right files, a clear error from everything else."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter

from stages.text.errors import VocabularyDamaged
from stages.text.gguf_metadata import read_metadata

WriteGguf = Callable[[Callable[[GGUFWriter], None]], Path]


def _everything(key: str) -> bool:
    return True


def _add_every_type(writer: GGUFWriter) -> None:
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
    writer.add_array("t.array", ["x", "yy"])


def test_every_type_is_read(write_gguf: WriteGguf) -> None:
    values = read_metadata(write_gguf(_add_every_type), lambda key: key.startswith("t."))
    assert values == {
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
        "t.array": ("x", "yy"),
    }
    assert values["t.bool"] is True


def test_file_cut_anywhere_is_refused(write_gguf: WriteGguf, tmp_path: Path) -> None:
    whole = write_gguf(_add_every_type).read_bytes()
    cut = tmp_path / "cut.gguf"
    metadata_end = whole.index(b"yy") + 2
    for length in range(metadata_end):
        cut.write_bytes(whole[:length])
        with pytest.raises(VocabularyDamaged):
            read_metadata(cut, _everything)


def test_flipped_byte_gives_values_or_a_clear_error(write_gguf: WriteGguf, tmp_path: Path) -> None:
    whole = write_gguf(_add_every_type).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    num_refused = 0
    for index in range(len(whole)):
        damaged.write_bytes(whole[:index] + bytes([whole[index] ^ 0xFF]) + whole[index + 1 :])
        try:
            read_metadata(damaged, _everything)
        except VocabularyDamaged:
            num_refused += 1
    assert num_refused > len(whole) // 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648, expected 2 or 3 in little-endian"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "cut short or damaged: 9223372036854775808 bytes"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 13), "k has type 13"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "k has type 9"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQQcIQc", 3, 0, 1, 1, b"k", 8, 1, b"\xff"), "is not UTF-8"),
    ],
)
def test_foreign_or_damaged_file_is_refused_with_the_reason(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    with pytest.raises(VocabularyDamaged, match=message) as caught:
        read_metadata(path, _everything)
    assert str(path) in str(caught.value)


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VocabularyDamaged, match="cannot be read: No such file"):
        read_metadata(tmp_path / "none.gguf", _everything)
    with pytest.raises(VocabularyDamaged, match="cannot be read"):
        read_metadata(tmp_path, _everything)
