"""Canonical KV: the compiled rounding is the codecs' rounding, on every kind of input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kv_store.codecs.base import Codec
from kv_store.codecs.fp8_e4m3 import Fp8E4m3
from kv_store.codecs.registry import CODECS
from stages.engine.arithmetic import compiled
from stages.engine.row_rounding import load_codes, row_code, row_scale

ids = [codec.name for codec in CODECS]
finite_rows = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.just(64)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True),
)


@compiled
def round_rows(rows, codes, scales, out):
    for r in range(len(rows)):
        largest = np.float32(0)
        for d in range(rows.shape[1]):
            largest = max(largest, abs(rows[r, d]))
        scales[r] = row_scale(codes[r], largest)
        for d in range(rows.shape[1]):
            codes[r, d] = row_code(codes[r], rows[r, d], scales[r])
        load_codes(codes[r], rows.shape[1], out[r])


def compiled_rounding(rows: np.ndarray, codec: Codec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes = np.empty(rows.shape, codec.code_dtype)
    scales, values = np.empty(len(rows), np.float32), np.empty(rows.shape, np.float32)
    round_rows(rows, codes, scales, values)
    return codes, scales, values


@pytest.mark.parametrize("codec", CODECS, ids=ids)
@given(rows=finite_rows)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_compiled_and_specified_rounding_agree(codec: Codec, rows: np.ndarray) -> None:
    codes, scales, values = compiled_rounding(rows, codec)
    expected = codec.derive_scales(rows)
    assert np.array_equal(scales, expected)
    assert np.array_equal(codes, codec.encode(rows, expected))
    assert np.array_equal(values * scales[:, None], codec.decode(codes, scales))


@pytest.mark.parametrize("codec", CODECS, ids=ids)
@given(rows=finite_rows)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_rounding_with_the_carried_scale_is_the_identity_on_rounded_rows(codec: Codec, rows: np.ndarray) -> None:
    scales = codec.derive_scales(rows)
    codes = codec.encode(rows, scales)
    rounded = codec.decode(codes, scales)
    assert np.array_equal(codec.encode(rounded, scales), codes)
    assert np.array_equal(codec.unpack_scales(codec.pack_scales(scales)), scales)


def test_fp8_equals_torch_on_every_half_precision_number() -> None:
    half = np.arange(65536, dtype=np.uint16).view(np.float16)
    values = half[np.isfinite(half) & (np.abs(half) <= 448)].astype(np.float32)
    ours = Fp8E4m3().encode(values[:, None], np.ones(len(values), np.float32))[:, 0]
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(ours, theirs)


def test_fp8_equals_torch_around_every_rounding_boundary() -> None:
    codec = Fp8E4m3()
    codes = np.arange(0x7F, dtype=np.uint8)
    values = codec.decode(codes[:, None], np.ones(len(codes), np.float32))[:, 0]
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    near = np.concatenate(
        [values, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))]
    )
    near = np.concatenate([near, -near])
    ours = codec.encode(near[:, None], np.ones(len(near), np.float32))[:, 0]
    theirs = torch.from_numpy(near).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(ours, theirs)


def test_fp8_decoding_equals_torch_on_every_code() -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    _, _, values = np.empty(0), np.empty(0), np.empty((len(codes), 1), np.float32)
    decode = compiled(_decode_each)
    decode(codes[:, None], values)
    assert np.array_equal(values[:, 0], theirs)


def _decode_each(codes, out):
    for i in range(len(codes)):
        load_codes(codes[i], 1, out[i])
