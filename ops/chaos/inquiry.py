"""What a row may ask, what is expected of it, and what the row has found: numbers in words, and problems.

Owns the notebook of a row. A row collects problems instead of stopping at the first one; a row without problems has
passed. Knows nothing about stacks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.chaos.reference import Reference
from ops.outputs import Output
from pipeline.client.asks import NewRequest, make_ask


class NotRun(Exception):  # noqa: N818 - reads as the fact it states
    """A row cannot be run here; says why."""


@dataclass(frozen=True, slots=True)
class Models:
    """Files of models."""

    served: Path
    """What the row's stacks serve."""
    other: Path
    """A small one that is not the same."""


class Inquiry:
    """One row's questions and findings."""

    def __init__(self, models: Models, reference: Reference, *, long: bool = False, timed: bool = True) -> None:
        """Begin with nothing found.

        Args:
            models: What stacks serve.
            reference: Answers without faults.
            long: Whether minutes are well spent.
            timed: Whether what takes too long is a problem, which makes sense on a machine that does nothing else.
        """
        self.models = models
        self.long = long
        self._timed = timed
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._reference = reference

    def note(self, happened: str) -> None:
        """Keep something that happened, in words."""
        self.notes.append(happened)

    def require(self, fact: object, otherwise: str) -> None:
        """Keep a problem unless something holds."""
        if not fact:
            self.problems.append(otherwise)

    def require_soon(self, fact: object, otherwise: str) -> None:
        """Keep a problem unless something took no longer than it may, where that is judged."""
        if not fact and self._timed:
            self.problems.append(otherwise)

    def blame(self, problems: Iterable[str]) -> None:
        """Keep problems."""
        self.problems += problems

    async def expected(self, asks: Sequence[NewRequest]) -> list[Output]:
        """Return what requests come to where nothing goes wrong."""
        return await self._reference.outputs(asks)

    def ask(self, prompt: str, max_tokens: int, **params: Any) -> NewRequest:
        """Return a request of the served model; greedy with seed 1 unless it says otherwise."""
        values = {"seed": 1, "temperature": 0.0, "max_tokens": max_tokens} | params
        return make_ask(prompt, model=str(self.models.served), **values)
