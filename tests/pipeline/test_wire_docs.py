"""docs/wire.md says what is there: every field that a client writes or reads, the keys, and a message that works."""

import json
import re
from pathlib import Path
from typing import get_args

import msgpack
import pytest
from pydantic import BaseModel

from pipeline.keys import MAX_FINISHED, MAX_QUEUE, PRIORITIES, RESULT_TTL_S, Keys
from pipeline.messages import (
    Delta,
    Failure,
    FinishReason,
    GenerateRequest,
    Stamp,
    Terminal,
    TokenLogprobs,
    Usage,
)
from pipeline.params import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams
from pipeline.redis_calls import script_source
from pipeline.redis_results import RESULT_PAGE
from pipeline.wire import COMPRESS_ABOVE_BYTES, SCHEMA_VERSION, unpack

TEXT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
MESSAGES = (GenerateRequest, SamplingParams, Delta, TokenLogprobs, Terminal, Usage, Failure, Stamp)


@pytest.mark.parametrize("message", MESSAGES)
def test_every_field_is_there(message: type[BaseModel]) -> None:
    assert [name for name in message.model_fields if f"`{name}`" not in TEXT] == []


def test_every_key_and_word_is_there() -> None:
    keys = Keys("ns")
    names = [keys.request("ID"), keys.results("ID"), keys.finished(), keys.chunks_prefix("ID")]
    streams = [
        keys.stream(stage, PRIORITIES[0]).replace(PRIORITIES[0], "PRIORITY") for stage in ("tokenizer", "prefill")
    ]
    assert [name for name in (*names, *streams) if f"`{name}`" not in TEXT] == []
    assert [word for word in (*PRIORITIES, *get_args(FinishReason)) if f"`{word}`" not in TEXT] == []


def test_numbers_are_those_of_the_code() -> None:
    assert f"`version` is {SCHEMA_VERSION}." in TEXT
    assert f"more than {COMPRESS_ABOVE_BYTES} bytes" in TEXT
    assert f"`SLUICE_RESULT_TTL_S` ({RESULT_TTL_S})" in TEXT
    assert f"`SLUICE_MAX_QUEUE`, {MAX_QUEUE})" in TEXT
    assert f"the length of the log ({MAX_FINISHED})" in TEXT
    assert f"COUNT {RESULT_PAGE}" in TEXT
    assert f"at most {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_CHARS} characters" in TEXT
    assert f"at most {MAX_LOGIT_BIASES};" in TEXT
    assert f"0 to {MAX_LOGPROBS} alternatives" in TEXT


@pytest.mark.parametrize("script", ["admit", "cancel"])
def test_replies_of_the_scripts_are_there(script: str) -> None:
    replies = re.findall(r"return '(\w+)'", script_source(script))
    assert replies
    assert [reply for reply in replies if f"| `{reply}` |" not in TEXT] == []


def test_the_message_of_the_example_is_one() -> None:
    [example] = re.findall(r"^```json\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    body = msgpack.packb(json.loads(example))
    request = unpack(msgpack.packb([SCHEMA_VERSION, 0, body]) or b"", GenerateRequest)
    assert (request.params.seed, request.speculate, request.prompt) == (7, True, None)


def test_a_message_with_nothing_that_has_a_default_is_one() -> None:
    fields = {"kind": "terminal", "finish_reason": "cancelled"}
    assert unpack(msgpack.packb([1, 0, msgpack.packb(fields)]) or b"", Terminal) == Terminal(finish_reason="cancelled")
