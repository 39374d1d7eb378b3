"""Batch results: one output line for every input line, in OpenAI's format."""

import json
import math
from typing import Any

import pytest

from pipeline.batch.body import Endpoint
from pipeline.batch.lines import BatchLine, BatchLineError
from pipeline.batch.results import Completion, encode_line, outcome_of, refused_line, result_line
from pipeline.errors import StateDamaged
from pipeline.messages import ChatMessage, Delta, Failure, Terminal, TokenLogprobs, Usage
from pipeline.params import SamplingParams

TOKENS = {1: b"Hi", 2: b" \xf0\x9f", 3: b"\x8c\x8a", 4: b"!"}
USAGE = Usage(prompt_tokens=10, completion_tokens=3, draft_tokens=4, accepted_tokens=1)
FAILURE = Failure(
    stage="tokenizer", code="prompt_too_long", message="prompt: 9000 tokens", field="prompt", retryable=False
)


def batch_line(endpoint: Endpoint) -> BatchLine:
    chat = endpoint == "/v1/chat/completions"
    return BatchLine(
        line_number=7,
        custom_id="mine",
        endpoint=endpoint,
        model="tiny",
        prompt=None if chat else "Say hi",
        messages=(ChatMessage(role="user", content="Say hi"),) if chat else None,
        params=SamplingParams(),
        speculate=True,
    )


CHAT = batch_line("/v1/chat/completions")
PLAIN = batch_line("/v1/completions")
LOGPROBS = (
    TokenLogprobs(token_id=1, logprob=-0.5, top=((1, -0.5), (4, -2.0))),
    TokenLogprobs(token_id=2, logprob=-0.25, top=((2, -0.25), (3, -math.inf))),
)


def completion(**changes: Any) -> Completion:
    values = {"token_ids": (1, 2, 3), "text": "Hi 🌊", "finish_reason": "stop", "usage": USAGE}
    return Completion(**(values | changes))


def delta(first_index: int, *token_ids: int, text: str = "", **changes: Any) -> Delta:
    return Delta(first_index=first_index, token_ids=token_ids, text=text, **changes)


def test_a_chat_result_has_openais_shape() -> None:
    assert result_line(CHAT, "r1", 1700000000, completion()) == {
        "id": "batch_req_r1",
        "custom_id": "mine",
        "response": {
            "status_code": 200,
            "request_id": "r1",
            "body": {
                "id": "chatcmpl-r1",
                "object": "chat.completion",
                "created": 1700000000,
                "model": "tiny",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hi 🌊", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                        "token_ids": [1, 2, 3],
                    }
                ],
                "usage": {
                    "prompt_tokens": 10,
                    "completion_tokens": 3,
                    "total_tokens": 13,
                    "completion_tokens_details": {
                        "accepted_prediction_tokens": 1,
                        "rejected_prediction_tokens": 3,
                    },
                },
            },
        },
        "error": None,
    }


def body_of(record: dict[str, Any]) -> dict[str, Any]:
    return record["response"]["body"]


def test_a_completions_result_carries_text() -> None:
    body = body_of(result_line(PLAIN, "r1", 0, completion(finish_reason="length")))
    assert (body["id"], body["object"]) == ("cmpl-r1", "text_completion")
    assert body["choices"] == [
        {"index": 0, "text": "Hi 🌊", "logprobs": None, "finish_reason": "length", "token_ids": [1, 2, 3]}
    ]


def test_chat_logprobs_name_each_token_once_and_have_no_infinity() -> None:
    body = body_of(result_line(CHAT, "r1", 0, completion(logprobs=LOGPROBS), TOKENS.__getitem__))
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "Hi",
        "logprob": -0.5,
        "bytes": [72, 105],
        "top_logprobs": [
            {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
            {"token": "!", "logprob": -2.0, "bytes": [33]},
        ],
    }
    assert second["token"] == r"bytes:\x20\xf0\x9f"
    assert second["top_logprobs"][1] == {
        "token": r"bytes:\x8c\x8a",
        "logprob": -9999.0,
        "bytes": [0x8C, 0x8A],
    }


def test_completions_logprobs_have_the_older_shape() -> None:
    body = body_of(result_line(PLAIN, "r1", 0, completion(logprobs=LOGPROBS)))
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["token_id:1", "token_id:2"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [
            {"token_id:1": -0.5, "token_id:4": -2.0},
            {"token_id:2": -0.25, "token_id:3": -9999.0},
        ],
    }


def test_a_failure_becomes_an_error_and_no_response() -> None:
    assert result_line(CHAT, "r1", 0, FAILURE) == {
        "id": "batch_req_r1",
        "custom_id": "mine",
        "response": None,
        "error": {
            "code": "prompt_too_long",
            "message": "prompt: 9000 tokens",
            "param": "prompt",
            "line": 7,
            "stage": "tokenizer",
            "retryable": False,
        },
    }


def test_a_refused_line_gets_an_output_line_of_the_same_shape() -> None:
    error = BatchLineError(3, None, "invalid_json", "is not JSON", None)
    assert refused_line(error) == {
        "id": "batch_req_line_3",
        "custom_id": None,
        "response": None,
        "error": {
            "code": "invalid_json",
            "message": "is not JSON",
            "param": None,
            "line": 3,
            "stage": None,
            "retryable": False,
        },
    }


def test_an_encoded_line_is_one_line_for_every_reader() -> None:
    record = result_line(CHAT, "r1", 0, completion(text="a\nb\u2028c\u2029d\x85e\x0bf 🌊"))
    data = encode_line(record)
    assert data.endswith(b"\n")
    assert len(data.decode().splitlines()) == 1
    assert "🌊".encode() in data
    assert json.loads(data) == record


def test_deltas_and_terminal_make_a_completion() -> None:
    deltas = [
        delta(0, 1, text="Hi", logprobs=LOGPROBS[:1]),
        delta(1, 2, logprobs=LOGPROBS[1:]),
        delta(2, 3, text=" 🌊"),
    ]
    terminal = Terminal(finish_reason="stop", text="!", usage=USAGE)
    assert outcome_of(deltas, terminal) == completion(text="Hi 🌊!", logprobs=LOGPROBS)


@pytest.mark.parametrize(
    "deltas",
    [
        [delta(0, 1), delta(2, 3)],
        [delta(0, 1, 2), delta(1, 2, 3)],
        [delta(1, 2)],
        [delta(0, 1, 2)],
        [],
    ],
    ids=["gap", "twice", "late start", "short", "nothing"],
)
def test_missing_or_repeated_tokens_are_an_error_and_never_a_result(deltas: list[Delta]) -> None:
    with pytest.raises(StateDamaged, match="expected"):
        outcome_of(deltas, Terminal(finish_reason="stop", usage=USAGE))


def test_a_failed_request_is_its_failure_whatever_it_emitted() -> None:
    assert outcome_of([delta(0, 1)], Terminal(finish_reason="error", failure=FAILURE)) == FAILURE


def test_a_cancelled_request_is_a_failure_that_says_so() -> None:
    outcome = outcome_of([delta(0, 1)], Terminal(finish_reason="cancelled"))
    assert isinstance(outcome, Failure)
    assert outcome.code == "cancelled"


def test_an_error_without_a_reason_is_still_a_failure() -> None:
    outcome = outcome_of([], Terminal(finish_reason="error"))
    assert isinstance(outcome, Failure)
    assert outcome.code == "internal_error"
