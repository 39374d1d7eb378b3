import pytest
from pydantic import ValidationError

from kv_store.errors import InvalidValue
from kv_store.ref import BlobRef, check_name

BAD_NAMES = [
    "",
    "short_7",
    "x" * 81,
    "../../etc/passwd",
    "with/slash",
    ".tmp-hidden",
    "dotted.name",
    "UPPERCASE",
    "with-dash",
    "new_line\n",
    "zero\0byte",
    "ünïcödé_",
]


def _ref(**changes: object) -> BlobRef:
    fields: dict[str, object] = {"pool_id": "a1b2", "name": "blob_0001", "size_bytes": 129, "crc32": 7}
    return BlobRef.model_validate(fields | changes)


def test_reference_survives_the_way_through_a_message() -> None:
    assert BlobRef.model_validate(_ref().model_dump()) == _ref()


def test_reference_cannot_change() -> None:
    ref = _ref()

    with pytest.raises(ValidationError, match="frozen"):
        ref.crc32 = 8  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["blob_001", "0" * 80])
def test_name_of_eight_to_eighty_characters_is_accepted(name: str) -> None:
    check_name(name)
    assert _ref(name=name).name == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_name_that_could_leave_the_pool_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="name is"):
        check_name(name)
    with pytest.raises(ValidationError, match="name"):
        _ref(name=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_id": ""},
        {"pool_id": "a:b"},
        {"size_bytes": 0},
        {"size_bytes": True},
        {"size_bytes": "129"},
        {"crc32": -1},
        {"crc32": 2**32},
        {"path": "/tmp"},
    ],
)
def test_reference_with_a_field_out_of_range_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        _ref(**changes)
