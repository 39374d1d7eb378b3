"""What one run gave, as something that is equal or is not: token ids, logprobs to the last bit, text.

Owns digests and the sentence that names the first difference. Knows nothing about how outputs came about.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Self

from pipeline.batch.results import Completion

DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class Output:
    """One request's output; a logprob is spelt in hexadecimal, which loses nothing."""

    token_ids: tuple[int, ...]
    logprobs: tuple[str, ...]
    text: str
    finish_reason: str

    @classmethod
    def of(cls, completion: Completion) -> Self:
        """Keep what must be equal; how many drafts were accepted need not be."""
        logprobs = tuple(
            " ".join(
                f"{token_id}:{logprob.hex()}" for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top)
            )
            for entry in completion.logprobs or ()
        )
        return cls(completion.token_ids, logprobs, completion.text, completion.finish_reason)


Outputs = Mapping[str, Output]
"""By custom_id."""


def digest(outputs: Outputs) -> str:
    """Return a short digest of all outputs, whatever their order."""
    listed = [(custom_id, astuple(outputs[custom_id])) for custom_id in sorted(outputs)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:DIGEST_CHARS]


def differences(expected: Outputs, actual: Outputs) -> list[str]:
    """Return a sentence for each request that is not the same in both."""
    found: list[str] = []
    for custom_id in sorted(expected.keys() | actual.keys()):
        one, other = expected.get(custom_id), actual.get(custom_id)
        if one is None or other is None:
            found.append(f"{custom_id}: is in one run only")
        elif one != other:
            found.append(f"{custom_id}: {_difference(one, other)}")
    return found


def _difference(one: Output, other: Output) -> str:
    for index, (expected, actual) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if expected != actual:
            return f"token {index} is {actual} and not {expected}"
    if len(one.token_ids) != len(other.token_ids):
        return f"{len(other.token_ids)} tokens and not {len(one.token_ids)}"
    for index, (expected, actual) in enumerate(zip(one.logprobs, other.logprobs, strict=False)):
        if expected != actual:
            return f"the logprobs of token {index} are {actual} and not {expected}"
    if len(one.logprobs) != len(other.logprobs):
        return f"{len(other.logprobs)} logprobs and not {len(one.logprobs)}"
    if one.text != other.text:
        return f"the text differs at character {_first_difference(one.text, other.text)}"
    return f"ended with {other.finish_reason} and not {one.finish_reason}"


def _first_difference(one: str, other: str) -> int:
    for index, (expected, actual) in enumerate(zip(one, other, strict=False)):
        if expected != actual:
            return index
    return min(len(one), len(other))
