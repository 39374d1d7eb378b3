"""Batch lines: every line comes out as a request or as a sentence its author can act on."""

import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.lines import MAX_LINE_BYTES, BatchLine, BatchLineError, read_batch
from pipeline.messages import ChatMessage
from pipeline.params import SamplingParams

MODEL = "smollm2-135m-instruct"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
EXAMPLES = Path(__file__).parents[3] / "examples" / "prompts.jsonl"


def chat(**body: object) -> dict[str, object]:
    return line(CHAT, {"model": MODEL, "messages": HELLO, **body})


def completion(**body: object) -> dict[str, object]:
    return line(COMPLETIONS, {"model": MODEL, "prompt": "Once", **body})


def line(url: str, body: object) -> dict[str, object]:
    return {"custom_id": "one", "method": "POST", "url": url, "body": body}


def read(*lines: object) -> list[BatchLine | BatchLineError]:
    data = b"".join(text if isinstance(text, bytes) else json.dumps(text).encode() + b"\n" for text in lines)
    return list(read_batch(io.BytesIO(data), MODEL))


def request_of(text: object) -> BatchLine:
    (result,) = read(text)
    assert isinstance(result, BatchLine), result
    return result


def error_of(text: object) -> BatchLineError:
    (result,) = read(text)
    assert isinstance(result, BatchLineError), result
    return result


def test_a_chat_line_becomes_a_request() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert request_of(chat(messages=messages, temperature=0.8, seed=7, stop=["\n"], max_tokens=5)) == BatchLine(
        line_number=1,
        custom_id="one",
        endpoint=CHAT,
        model=MODEL,
        prompt=None,
        messages=(ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")),
        params=SamplingParams(temperature=0.8, seed=7, stop=("\n",), max_tokens=5),
        speculate=True,
    )


def test_a_completions_line_becomes_a_request() -> None:
    request = request_of(completion(logprobs=3, speculate=False, user="me", n=1, stream=False))
    assert (request.prompt, request.messages, request.speculate) == ("Once", None, False)
    assert request.params == SamplingParams(logprobs=3)


@pytest.mark.parametrize(("given", "timeout_s"), [(None, None), (0.5, 0.5), (60, 60.0), (86400, 86400.0)])
def test_a_line_may_have_a_time_limit(given: float | None, timeout_s: float | None) -> None:
    assert request_of(chat(timeout_s=given)).timeout_s == timeout_s
    assert request_of(completion(timeout_s=given)).timeout_s == timeout_s
    assert request_of(chat()).timeout_s is None


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"max_completion_tokens": 9}, SamplingParams(max_tokens=9)),
        ({"max_completion_tokens": 9, "max_tokens": 9}, SamplingParams(max_tokens=9)),
        ({"logprobs": True}, SamplingParams(logprobs=0)),
        ({"logprobs": True, "top_logprobs": 4}, SamplingParams(logprobs=4)),
        ({"logprobs": False}, SamplingParams()),
        ({"logit_bias": {"50": -100}}, SamplingParams(logit_bias={50: -100})),
        (
            {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1},
            SamplingParams(top_k=40, min_p=0.1, repetition_penalty=1.1),
        ),
        (
            {"presence_penalty": 1, "frequency_penalty": -1},
            SamplingParams(presence_penalty=1, frequency_penalty=-1),
        ),
        ({"ignore_eos": True}, SamplingParams(ignore_eos=True)),
        ({"temperature": None, "seed": None, "stop": None, "n": None, "logprobs": None}, SamplingParams()),
    ],
)
def test_chats_own_names_are_mapped(body: dict[str, object], params: SamplingParams) -> None:
    assert request_of(chat(**body)).params == params


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": 3.5}, "temperature: must be between 0 and 2, got 3.5"),
        ({"max_completion_tokens": 0}, "max_completion_tokens: must be between 1 and 2147483647, got 0"),
        (
            {"max_completion_tokens": 5, "max_tokens": 6},
            "max_completion_tokens: differs from max_tokens; give one of them",
        ),
        ({"logprobs": 3}, "logprobs: must be true or false, got 3"),
        ({"top_logprobs": 3}, "top_logprobs: needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: must be between 0 and 20, got 21"),
        ({"n": 2}, "n: must be 1, got 2; ask several times with other seeds"),
        ({"stream": True}, "stream: must be false or absent, got true"),
        ({"user": 5}, "user: must be a string, got 5"),
        ({"speculate": "no"}, "speculate: must be true or false, got 'no'"),
        ({"timeout_s": 0}, "timeout_s: must be a number of seconds above 0, at most 86400, got 0"),
        ({"timeout_s": 86401}, "timeout_s: must be a number of seconds above 0, at most 86400, got 86401"),
        ({"timeout_s": True}, "timeout_s: must be a number of seconds above 0, at most 86400, got true"),
        ({"timeout_s": "60"}, "timeout_s: must be a number of seconds above 0, at most 86400, got '60'"),
        ({"min_tokens": 5}, "min_tokens: is not a known parameter; did you mean max_tokens?"),
        ({"prompt": "x"}, "prompt: belongs to /v1/completions, not to /v1/chat/completions"),
        ({"messages": None}, "messages: is missing"),
        ({"messages": []}, "messages: is empty"),
        ({"messages": "Hello"}, "messages: must be a list of messages, got 'Hello'"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages: has no text in any message"),
        ({"messages": ["Hello"]}, "messages[0]: must be an object with role and content, got 'Hello'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        (
            {"messages": [*HELLO, {"role": "user", "content": []}]},
            "messages[1].content: must be a string, got a list",
        ),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "messages[0].role: must be one of system, user, assistant, got 'bot'",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "name": "y"}]},
            "messages[0].name: is not known; a message has role and content",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud83d"}]},
            "messages[0].content: holds half a surrogate pair, which is not Unicode text",
        ),
    ],
)
def test_a_wrong_chat_body_is_refused_by_field(body: dict[str, object], message: str) -> None:
    error = error_of(chat(**body))
    assert error.message == message
    assert (error.code, error.custom_id) == ("invalid_request", "one")
    assert error.field == message.partition(":")[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "prompt: is empty"),
        ({"prompt": None}, "prompt: is missing"),
        ({"prompt": ["a", "b"]}, "prompt: must be one string, got a list; send one request for each prompt"),
        ({"prompt": 5}, "prompt: must be a string, got 5"),
        ({"logprobs": True}, "logprobs: must be an integer, got true"),
        ({"messages": HELLO}, "messages: belongs to /v1/chat/completions, not to /v1/completions"),
    ],
)
def test_a_wrong_completions_body_is_refused_by_field(body: dict[str, object], message: str) -> None:
    assert error_of(completion(**body)).message == message


def test_another_model_is_refused_with_both_names() -> None:
    error = error_of(chat(model="gpt-4"))
    assert error.code == "wrong_model"
    assert error.message == "model: this stack serves smollm2-135m-instruct, got 'gpt-4'"
    assert error_of(chat(model=None)).message == "model: is missing; this stack serves smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"custom_id": None}, "invalid_line", "custom_id: is missing"),
        ({"custom_id": 5}, "invalid_line", "custom_id: must be a string of 1 to 512 characters, got 5"),
        ({"custom_id": ""}, "invalid_line", "custom_id: must be a string of 1 to 512 characters, got ''"),
        (
            {"custom_id": "\ud800"},
            "invalid_line",
            r"custom_id: must be a string of 1 to 512 characters, got '\ud800'",
        ),
        ({"method": "GET"}, "invalid_line", "method: must be POST, got 'GET'"),
        ({"method": None}, "invalid_line", "method: is missing"),
        (
            {"url": "/v1/embeddings"},
            "invalid_line",
            "url: must be /v1/chat/completions or /v1/completions, got '/v1/embeddings'",
        ),
        ({"url": ["x"]}, "invalid_line", "url: must be /v1/chat/completions or /v1/completions, got a list"),
        ({"body": None}, "invalid_line", "body: is missing"),
        ({"body": "x"}, "invalid_line", "body: must be an object, got 'x'"),
        ({"bdy": {}}, "invalid_line", "bdy: is not a known parameter; did you mean body?"),
        (
            {"\ud800": 1},
            "invalid_line",
            r"\ud800: is not a known parameter; known: body, custom_id, method, url",
        ),
    ],
)
def test_a_wrong_envelope_is_refused_by_field(change: dict[str, object], code: str, message: str) -> None:
    error = error_of(chat() | change)
    assert (error.code, error.message) == (code, message)
    error.message.encode()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"custom_id": "a",}', "is not JSON: "),
        (b'{"custom_id": "a"', "is not JSON: Expecting ',' delimiter at column 18"),
        (b"hello", "is not JSON: Expecting value at column 1"),
        (b"[1]", "must be a JSON object, got a list"),
        (b"7", "must be a JSON object, got 7"),
        (b'{"custom_id": "\xff"}', "is not UTF-8 at byte 16"),
        (b'{"a": NaN}', "is not usable JSON: NaN is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not usable JSON: Exceeds the limit"),
        (b"[" * 100_000, "is not usable JSON: nested too deeply"),
        (b"\0", "is not JSON: Expecting value at column 1"),
    ],
)
def test_what_is_not_a_json_object_is_refused(raw: bytes, message: str) -> None:
    error = error_of(raw)
    assert (error.code, error.field, error.custom_id) == ("invalid_json", None, None)
    assert error.message.startswith(message)


@pytest.mark.parametrize("depth", [100, 900, 950, 980, 990])
def test_a_deeply_nested_value_is_refused_like_any_other(depth: int) -> None:
    raw = json.dumps(chat(temperature="@")).encode().replace(b'"@"', b"[" * depth + b"]" * depth)
    assert error_of(raw).code in {"invalid_request", "invalid_json"}


def test_a_repeated_custom_id_names_the_first_line() -> None:
    results = read(chat(), chat() | {"custom_id": "two"}, chat(temperature=9))
    error = results[2]
    assert isinstance(error, BatchLineError)
    assert (error.code, error.line_number) == ("duplicate_custom_id", 3)
    assert error.message == "custom_id: 'one' is already on line 1"
    assert str(error) == "line 3 ('one'): custom_id: 'one' is already on line 1"


def test_a_bad_line_does_not_stop_the_file() -> None:
    results = read(
        b"oops\n",
        chat(),
        b"\n",
        b"  \r\n",
        chat(n=3) | {"custom_id": "two"},
        completion() | {"custom_id": "x"},
    )
    assert [(type(result), result.line_number) for result in results] == [
        (BatchLineError, 1),
        (BatchLine, 2),
        (BatchLineError, 5),
        (BatchLine, 6),
    ]


def test_a_byte_order_mark_and_windows_line_ends_are_accepted() -> None:
    two = json.dumps(chat() | {"custom_id": "two"}).encode()
    results = read(b"\xef\xbb\xbf" + json.dumps(chat()).encode() + b"\r\n", two + b"\r\n")
    assert [type(result) for result in results] == [BatchLine, BatchLine]


@pytest.mark.parametrize("more", [1, 100, MAX_LINE_BYTES, 3 * MAX_LINE_BYTES + 5])
def test_a_line_that_is_too_long_is_one_error_and_the_next_line_is_read(more: int) -> None:
    results = read(b"x" * (MAX_LINE_BYTES + more) + b"\n", chat(), b"y" * (MAX_LINE_BYTES + more))
    assert [(type(result), result.line_number) for result in results] == [
        (BatchLineError, 1),
        (BatchLine, 2),
        (BatchLineError, 3),
    ]
    assert isinstance(results[0], BatchLineError)
    assert (results[0].code, results[0].message) == ("line_too_long", "has more than 1048576 bytes")


def test_a_line_of_exactly_the_limit_is_read() -> None:
    empty = len(json.dumps(completion(prompt="")).encode()) + 1
    request = request_of(completion(prompt="x" * (MAX_LINE_BYTES - empty)))
    assert len(request.prompt or "") == MAX_LINE_BYTES - empty


class EndlessFile(io.RawIOBase):
    """A binary file that makes its lines as they are read."""

    def __init__(self, num_lines: int) -> None:
        self.lines = self.make(num_lines)

    def make(self, num_lines: int) -> Iterator[bytes]:
        for index in range(num_lines):
            yield (json.dumps(completion(prompt="word " * 2000) | {"custom_id": f"id-{index}"}).encode() + b"\n")

    def readline(self, size: int | None = -1, /) -> bytes:
        return next(self.lines, b"")


def test_a_large_file_is_read_in_little_memory() -> None:
    num_lines = 2000  # 20 MB
    tracemalloc.start()
    try:
        count = sum(isinstance(result, BatchLine) for result in read_batch(EndlessFile(num_lines), MODEL))  # pyright: ignore[reportArgumentType]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == num_lines
    assert peak < 2_000_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=5,
)
field_names = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "temperature",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "n",
        "logit_bias",
    ]
)


@settings(derandomize=True, deadline=None)
@given(st.sampled_from([CHAT, COMPLETIONS]), st.dictionaries(field_names, json_values))
def test_whatever_a_body_holds_it_is_read_or_refused(url: str, body: dict[str, object]) -> None:
    (result,) = read(line(url, {"model": MODEL, **body}))
    if isinstance(result, BatchLineError):
        result.message.encode()


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=200).filter(lambda data: b"\n" not in data))
def test_whatever_bytes_a_line_holds_it_is_read_or_refused(data: bytes) -> None:
    assert len(read(data + b"\n")) == (1 if data.removeprefix(b"\xef\xbb\xbf").strip() else 0)


def test_the_examples_are_all_accepted_and_varied() -> None:
    with EXAMPLES.open("rb") as file:
        results = list(read_batch(file, MODEL))
    requests = [result for result in results if isinstance(result, BatchLine)]
    assert len(requests) == len(results) >= 24
    assert {request.endpoint for request in requests} == {CHAT, COMPLETIONS}
    assert {request.params.temperature for request in requests} >= {0.0, 0.8}
    assert all(request.params.max_tokens for request in requests)
    assert all(request.params.seed is not None for request in requests if request.params.temperature)
    assert any(request.params.stop for request in requests)
