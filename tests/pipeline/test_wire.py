"""Bytes that are messages, and all the ways in which bytes are not."""

from typing import Any, cast

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kv_store.ref import BlobRef
from pipeline import wire
from pipeline.errors import WireError
from pipeline.messages import (
    ChatMessage,
    Delta,
    Failure,
    GenerateRequest,
    Message,
    PrefilledPrompt,
    RawChunk,
    SealedChunk,
    Stamp,
    Terminal,
    TokenizedPrompt,
    TokenLogprobs,
    Usage,
)
from pipeline.params import SamplingParams
from pipeline.wire import MAX_BYTES, pack, read_identity, read_stamps, unpack

PARAMS = SamplingParams(temperature=0.7, logit_bias={7: -1.5, 3: 2.0}, stop=("###", "ß"), seed=2**63 - 1)
REF = BlobRef(pool_id="pool-1", name="kv_0123456789", size_bytes=100, crc32=2**32 - 1)
STAMPS = (Stamp(boundary="admitted", at_us=1_700_000_000_000_000),)
HEAD: dict[str, Any] = {"request_id": "r-1", "attempt": 2, "priority": "batch", "stamps": STAMPS}
MESSAGES: list[Message] = [
    GenerateRequest(**HEAD, model="m", prompt="हैलो 🙂", params=PARAMS),
    GenerateRequest(
        **HEAD,
        model="m",
        messages=(ChatMessage(role="system", content=""), ChatMessage(role="user", content="x" * 9000)),
        params=PARAMS,
        speculate=False,
    ),
    TokenizedPrompt(**HEAD, prompt_token_ids=(0, 5, 2**31 - 1), params=PARAMS, max_tokens=1),
    RawChunk(**HEAD, chunk_index=0, start_token=0, ref=REF, content_address=bytes(range(32))),
    PrefilledPrompt(
        **HEAD,
        prompt_token_ids=tuple(range(5000)),
        first_token_id=0,
        params=PARAMS,
        max_tokens=9,
        num_prefilled_tokens=5000,
        num_chunks=20,
        chunk_tokens=256,
        fingerprint=bytes(32),
    ),
    SealedChunk(stamps=STAMPS, chunk_index=3, ref=REF, content_address=bytes(32)),
    Delta(
        first_index=0,
        token_ids=(1, 2),
        text="",
        logprobs=(TokenLogprobs(token_id=1, logprob=-0.0, top=((1, -0.5), (9, -1e9))),),
    ),
    Terminal(
        finish_reason="error",
        usage=Usage(prompt_tokens=1, completion_tokens=0),
        failure=Failure(stage="decode", code="x", message="y", retryable=True),
    ),
]


def encoded(value: object) -> bytes:
    return cast("bytes", msgpack.packb(value))


def enveloped(fields: object, version: object = wire.SCHEMA_VERSION, flag: object = 0) -> bytes:
    return encoded([version, flag, encoded(fields)])


def reason_of(data: bytes, message_type: type[Message] = Delta) -> str:
    with pytest.raises(WireError) as caught:
        unpack(data, message_type)
    return caught.value.reason


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: Message) -> None:
    assert unpack(pack(message), type(message)) == message


def test_long_messages_are_compressed_and_short_ones_are_not() -> None:
    long, short = (Delta(first_index=0, token_ids=(1,), text="a" * n) for n in (100_000, 10))
    assert len(pack(long)) < 1000
    assert b"a" * 10 in pack(short)
    assert unpack(pack(long), Delta) == long


@pytest.mark.parametrize("message", MESSAGES[:3], ids=lambda message: type(message).__name__)
def test_a_message_cut_anywhere_is_refused(message: Message) -> None:
    data = pack(message)
    for length in range(0, len(data), max(1, len(data) // 100)):
        assert reason_of(data[:length], type(message)) == "not_msgpack"


def test_a_longer_message_is_refused() -> None:
    assert reason_of(pack(MESSAGES[6]) + b"\x00") == "not_msgpack"


@pytest.mark.parametrize("data", [b"", b"hello", b"\xc1", b"\xff" * 100, b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff"])
def test_bytes_that_are_not_msgpack_are_refused(data: bytes) -> None:
    assert reason_of(data) in ("not_msgpack", "envelope")


@pytest.mark.parametrize("version", [0, 2, 2**40])
def test_another_version_is_refused(version: int) -> None:
    assert reason_of(enveloped({"kind": "delta"}, version)) == "version"


@pytest.mark.parametrize(
    "envelope",
    [None, 1, "x", [], {}, [True, 0, b""], [1], [1, 0], [1, 0, "text"], [1, 0, b"", 0], [1, 2, b""], [1, False, b""]],
)
def test_another_envelope_is_refused(envelope: object) -> None:
    assert reason_of(encoded(envelope)) == "envelope"


@pytest.mark.parametrize("fields", [None, [], "delta", {}, {"kind": None}, {"kind": "terminal"}])
def test_another_kind_is_refused(fields: object) -> None:
    assert reason_of(enveloped(fields)) == "kind"


def test_integer_keys_and_text_that_is_not_unicode_are_refused() -> None:
    assert reason_of(enveloped({1: 2})) == "not_msgpack"
    assert reason_of(enveloped({"kind": "delta"}).replace(b"delta", b"d\xfflta")) == "not_msgpack"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first_index", True),
        ("first_index", -1),
        ("first_index", "0"),
        ("first_index", 1.0),
        ("token_ids", []),
        ("token_ids", [2**31]),
        ("text", b"bytes"),
        ("text", None),
        ("unknown", 1),
    ],
)
def test_a_wrong_field_is_named_but_its_value_is_not(field: str, value: object) -> None:
    fields = {"kind": "delta", "first_index": 0, "token_ids": [1], "text": ""} | {field: value}
    with pytest.raises(WireError, match=f"fields: {field}") as caught:
        unpack(enveloped(fields), Delta)
    assert "bytes" not in caught.value.detail


def test_a_message_over_the_limit_is_not_packed() -> None:
    with pytest.raises(WireError, match="oversize"):
        pack(Delta(first_index=0, token_ids=(1,), text="a" * MAX_BYTES))


def test_data_over_the_limit_are_not_decoded() -> None:
    assert reason_of(b"\x00" * (MAX_BYTES + 1)) == "oversize"


def test_a_bomb_is_not_decompressed() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(MAX_BYTES + 1))
    assert len(bomb) < 10_000
    assert reason_of(encoded([1, 1, bomb])) == "oversize"


def test_a_frame_that_hides_its_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    assert reason_of(encoded([1, 1, frame])) == "oversize"


def test_a_damaged_frame_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(encoded({"kind": "delta"}) * 1000)
    for damaged in (b"", b"x" * 50, frame[:-5], frame + b"more"):
        assert reason_of(encoded([1, 1, damaged])) in ("compression", "oversize")


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for candidate in (data, encoded([1, 0, data]), encoded([1, 1, data])):
        with pytest.raises(WireError):
            unpack(candidate, Delta)
        assert read_identity(candidate) is None or candidate


def test_the_identity_is_read_from_any_work_item() -> None:
    assert read_identity(pack(MESSAGES[0])) == ("r-1", 2)
    assert read_identity(enveloped({"kind": "new", "request_id": "r", "attempt": 0, "more": 1})) == ("r", 0)


@pytest.mark.parametrize(
    "fields", [{}, [], {"request_id": "r"}, {"request_id": 1, "attempt": 0}, {"request_id": "r", "attempt": True}]
)
def test_no_identity_is_read_where_none_is(fields: object) -> None:
    assert read_identity(enveloped(fields)) is None
    assert read_identity(b"junk") is None


def test_stamps_are_read_whatever_else_is_wrong() -> None:
    assert read_stamps(pack(MESSAGES[0])) == STAMPS
    assert read_stamps(enveloped({"kind": "new", "stamps": [STAMPS[0].model_dump()]})) == STAMPS
    assert read_stamps(enveloped({"kind": "new", "stamps": [{"at_us": 1}]})) == ()
    assert read_stamps(enveloped({"kind": "new"})) == ()
    assert read_stamps(b"junk") == ()
