"""Results of a batch: what came out of one request, as one line of OpenAI's batch output format.

Owns the output's field names. Every input line gets exactly one output line: `response` is set if it was
served, `error` if it was not, never both. Knows nothing about files, queues or vocabularies.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.batch.lines import BatchLine, BatchLineError
from pipeline.errors import StateDamaged
from pipeline.messages import Delta, Failure, Terminal, TokenLogprobs, Usage

TokenBytes = Callable[[int], bytes]

_CHAT = "/v1/chat/completions"
_NO_PROBABILITY = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have
_LINE_BREAKS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of a request that was served."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] | None = None


def outcome_of(deltas: Sequence[Delta], terminal: Terminal) -> Completion | Failure:
    """Return what a finished result stream amounts to; what a failed or cancelled request emitted is dropped.

    Raises:
        StateDamaged: tokens are missing or there twice.
    """
    if terminal.failure is not None or terminal.finish_reason == "error":
        return terminal.failure or _failure("internal_error", "failed without a reason")
    if terminal.finish_reason == "cancelled":
        return _failure("cancelled", "was cancelled")
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for delta in deltas:
        if delta.first_index != len(token_ids):
            raise StateDamaged((f"token {len(token_ids)} expected in the results, got {delta.first_index}",))
        token_ids += delta.token_ids
        logprobs += delta.logprobs or ()
    usage = terminal.usage or Usage(prompt_tokens=0, completion_tokens=len(token_ids))
    if usage.completion_tokens != len(token_ids):
        raise StateDamaged((f"{usage.completion_tokens} tokens expected, {len(token_ids)} in the results",))
    return Completion(
        token_ids=tuple(token_ids),
        text="".join(delta.text for delta in deltas) + terminal.text,
        finish_reason=terminal.finish_reason,
        usage=usage,
        logprobs=tuple(logprobs) if logprobs else None,
    )


def _failure(code: str, message: str) -> Failure:
    return Failure(stage="client", code=code, message=message, retryable=False)


def result_line(
    line: BatchLine,
    request_id: str,
    created_s: int,
    outcome: Completion | Failure,
    token_bytes: TokenBytes | None = None,
    role: str = "assistant",
) -> dict[str, object]:
    """Return the output line of a request that was admitted.

    Args:
        line: the input line.
        request_id: ours.
        created_s: epoch seconds.
        outcome: from `outcome_of`.
        token_bytes: the bytes of a token, to name tokens in logprobs; without it they are `token_id:<id>`.
        role: of the answer to a chat.
    """
    if isinstance(outcome, Failure):
        error = _error(line.line_number, outcome.code, outcome.message, outcome.field)
        error |= {"stage": outcome.stage, "retryable": outcome.retryable}
        return _output(request_id, line.custom_id, None, error)
    response: dict[str, object] = {
        "status_code": 200,
        "request_id": request_id,
        "body": _body(line, request_id, created_s, outcome, _Naming(token_bytes, role)),
    }
    return _output(request_id, line.custom_id, response, None)


def refused_line(error: BatchLineError) -> dict[str, object]:
    """Return the output line of an input line that never became a request."""
    details = _error(error.line_number, error.code, error.message, error.field)
    details |= {"stage": None, "retryable": False}
    return _output(f"line_{error.line_number}", error.custom_id, None, details)


def encode_line(record: dict[str, object]) -> bytes:
    """Return the record as one line of UTF-8, also for readers that split at every Unicode line break."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escape in _LINE_BREAKS.items():
        text = text.replace(character, escape)
    return text.encode() + b"\n"


def _output(
    request_id: str,
    custom_id: str | None,
    response: dict[str, object] | None,
    error: dict[str, object] | None,
) -> dict[str, object]:
    return {
        "id": f"batch_req_{request_id.removeprefix('req_').removeprefix('batch_')}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _error(line_number: int, code: str, message: str, field: str | None) -> dict[str, object]:
    return {"code": code, "message": message, "param": field, "line": line_number}


@dataclass(frozen=True, slots=True)
class _Naming:
    """What tokens and answers are called."""

    token_bytes: TokenBytes | None
    role: str


def _body(
    line: BatchLine, request_id: str, created_s: int, completion: Completion, naming: _Naming
) -> dict[str, object]:
    chat = line.endpoint == _CHAT
    choice: dict[str, object] = {"index": 0}
    if chat:
        choice["message"] = {"role": naming.role, "content": completion.text, "refusal": None}
    else:
        choice["text"] = completion.text
    choice["logprobs"] = _logprobs(completion.logprobs, naming.token_bytes, chat=chat)
    choice["finish_reason"] = completion.finish_reason
    choice["token_ids"] = list(completion.token_ids)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created_s,
        "model": line.model,
        "choices": [choice],
        "usage": _usage(completion.usage),
    }


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.draft_tokens - usage.accepted_tokens,
        },
    }


def _logprobs(
    logprobs: tuple[TokenLogprobs, ...] | None, token_bytes: TokenBytes | None, *, chat: bool
) -> dict[str, object] | None:
    if logprobs is None:
        return None
    if chat:
        return {"content": [_chat_entry(entry, token_bytes) for entry in logprobs], "refusal": None}
    return {
        "tokens": [_token_name(entry.token_id, token_bytes) for entry in logprobs],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            {_token_name(token_id, token_bytes): _finite(logprob) for token_id, logprob in entry.top}
            for entry in logprobs
        ],
    }


def _chat_entry(entry: TokenLogprobs, token_bytes: TokenBytes | None) -> dict[str, object]:
    top = [_chat_token(token_id, logprob, token_bytes) for token_id, logprob in entry.top]
    return _chat_token(entry.token_id, entry.logprob, token_bytes) | {"top_logprobs": top}


def _chat_token(token_id: int, logprob: float, token_bytes: TokenBytes | None) -> dict[str, object]:
    return {
        "token": _token_name(token_id, token_bytes),
        "logprob": _finite(logprob),
        "bytes": None if token_bytes is None else list(token_bytes(token_id)),
    }


def _token_name(token_id: int, token_bytes: TokenBytes | None) -> str:
    """Name a token without two tokens of one list sharing a name: half characters are spelt in hex."""
    if token_bytes is None:
        return f"token_id:{token_id}"
    data = token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _NO_PROBABILITY)
