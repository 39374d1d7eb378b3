import itertools

import pytest

from kv_store import layout
from kv_store.errors import InvalidValue
from kv_store.layout import PAGE_TOKENS, KvLayout


def test_page_is_one_attention_block() -> None:
    assert PAGE_TOKENS == 64


def test_fingerprint_is_32_bytes_in_hexadecimal() -> None:
    assert len(bytes.fromhex(KvLayout(30, 3, 64).fingerprint())) == 32


def test_fingerprint_is_the_same_in_every_build() -> None:
    # A change here makes every stored blob unreadable: it needs a new version in the text that is hashed.
    expected = "59e884e37d5e2074d5592ed4cf5c6288a066ff2e48a841ae38ef6e8eff7fa8d6"
    assert KvLayout(num_layers=30, num_kv_heads=3, head_dim=64).fingerprint() == expected


def test_equal_layouts_have_equal_fingerprints() -> None:
    assert KvLayout(2, 3, 64).fingerprint() == KvLayout(2, 3, 64).fingerprint()


def test_different_layouts_have_different_fingerprints() -> None:
    layouts = [KvLayout(*dimensions) for dimensions in itertools.product((1, 2, 11, 12), repeat=3)]

    assert len({one.fingerprint() for one in layouts}) == len(layouts)


@pytest.mark.parametrize(("constant", "value"), [("PAGE_TOKENS", 32), ("AXES", "[layer][token][dim]")])
def test_fingerprint_covers_how_pages_are_cut(monkeypatch: pytest.MonkeyPatch, constant: str, value: object) -> None:
    before = KvLayout(2, 3, 64).fingerprint()

    monkeypatch.setattr(layout, constant, value)

    assert KvLayout(2, 3, 64).fingerprint() != before


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1])
def test_dimension_below_one_is_refused(field: str, value: int) -> None:
    dimensions = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 64} | {field: value}

    with pytest.raises(InvalidValue) as refusal:
        KvLayout(**dimensions)

    assert (refusal.value.field, refusal.value.actual) == (field, value)
