"""What messages refuse, beyond types."""

import pytest
from pydantic import ValidationError

from pipeline.messages import ChatMessage, Delta, GenerateRequest, Stamp
from pipeline.params import SamplingParams

SEEDED = SamplingParams(seed=1)


def request(**fields: object) -> GenerateRequest:
    values = {"request_id": "r", "priority": "batch", "model": "m", "prompt": "p", "params": SEEDED} | fields
    return GenerateRequest.model_validate(values)


def test_a_request_has_a_prompt_or_messages() -> None:
    turns = (ChatMessage(role="user", content="x"),)
    assert request(prompt=None, messages=turns).messages == turns
    for both in ({"messages": turns}, {"prompt": None}):
        with pytest.raises(ValidationError, match="either a prompt or messages"):
            request(**both)


def test_a_request_without_a_seed_is_not_admitted() -> None:
    with pytest.raises(ValidationError, match="seed"):
        request(params=SamplingParams())


@pytest.mark.parametrize("request_id", ["", "a b", "a\n", "ü", "x" * 201, "a*"])
def test_request_ids_are_safe_in_keys_and_logs(request_id: str) -> None:
    with pytest.raises(ValidationError, match="request_id"):
        request(request_id=request_id)


@pytest.mark.parametrize("change", [{"priority": "urgent"}, {"attempt": -1}, {"extra": 1}, {"speculate": 1}])
def test_other_values_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        request(**change)


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        request().prompt = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_stamps_are_added_to_a_copy() -> None:
    first = request()
    second = first.stamped("tokenized", 5)
    assert first.stamps == ()
    assert second.stamps == (Stamp(boundary="tokenized", at_us=5),)


def test_a_delta_holds_a_token() -> None:
    with pytest.raises(ValidationError, match="token_ids"):
        Delta(first_index=0, token_ids=(), text="")
