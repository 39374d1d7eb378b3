import re

from kv_store import errors

_LINE = re.compile(r"─ (\w+) +(yes|no)\b")


def _subclasses(root: type[errors.KvStoreError]) -> set[type[errors.KvStoreError]]:
    found = {root}
    for child in root.__subclasses__():
        found |= _subclasses(child)
    return found


def test_every_error_is_retryable_exactly_when_the_drawing_says_so() -> None:
    drawn = {name: answer == "yes" for name, answer in _LINE.findall(errors.__doc__ or "")}

    branches = {"KvStoreError", "PoolError", "BlobError"}
    defined = {error.__name__: error.retryable for error in _subclasses(errors.KvStoreError)}
    assert drawn == {name: retryable for name, retryable in defined.items() if name not in branches}


def test_damage_names_the_blob_the_field_and_both_values() -> None:
    error = errors.BlobDamaged("blob_one", "crc32", 1, 2)

    assert str(error) == "blob blob_one: crc32 is 1, expected 2"
    assert (error.name, error.field, error.actual, error.expected) == ("blob_one", "crc32", 1, 2)


def test_full_pool_carries_its_numbers() -> None:
    error = errors.PoolFull(30, 20, 100)

    assert (error.wanted_bytes, error.free_bytes, error.quota_bytes) == (30, 20, 100)
    assert "30" in str(error)
    assert "20" in str(error)
    assert "100" in str(error)
