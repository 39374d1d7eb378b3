"""Which stacks and runs a proof needs: every pair of choices at least once, or every combination.

Owns the choices that must not change a token. Knows nothing about running them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations, product
from typing import Literal

Order = Literal["forward", "backward"]

NUM_DECODE = (1, 3)
CHUNK_TOKENS = (64, 512)
ORDERS: tuple[Order, ...] = ("forward", "backward")
SPECULATE = (True, False)


@dataclass(frozen=True, slots=True)
class StackChoice:
    """What a stack is started with; everything else can change from run to run."""

    num_decode: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the batch."""

    num_decode: int
    chunk_tokens: int
    order: Order
    speculate: bool

    @property
    def stack(self) -> StackChoice:
        """The stack it can run on."""
        return StackChoice(self.num_decode, self.chunk_tokens)


def every_case() -> list[Case]:
    """Return all combinations."""
    return [Case(*values) for values in product(NUM_DECODE, CHUNK_TOKENS, ORDERS, SPECULATE)]


def covering_cases() -> list[Case]:
    """Return few cases in which every pair of choices meets: the one with most new pairs, again and again."""
    candidates = every_case()
    missing = {pair for case in candidates for pair in pairs_of(case)}
    chosen: list[Case] = []
    while missing:
        best = max(candidates, key=lambda case: len(missing.intersection(pairs_of(case))))
        missing.difference_update(pairs_of(best))
        chosen.append(best)
    return chosen


def pairs_of(case: Case) -> Iterator[tuple[tuple[int, object], tuple[int, object]]]:
    """Yield each two choices that meet in a case, as (number of the choice, value)."""
    return combinations(enumerate(astuple(case)), 2)


def by_stack(cases: Sequence[Case]) -> dict[StackChoice, list[Case]]:
    """Return the runs of each stack, so that each is started once."""
    stacks: dict[StackChoice, list[Case]] = {}
    for case in cases:
        stacks.setdefault(case.stack, []).append(case)
    return stacks
