"""The limits of a chat template: how large a value may grow, how much it may make, how long it may run.

A template is a program from a model file, which anybody may have written. Jinja's sandbox keeps it from our
objects, but not from our memory or time: `{% set x = x + x %}` forty times is a terabyte. So every operation
that makes a value reports here (template_sandbox.py sees to that):

    a value   holds at most MAX_VALUE_UNITS units: one a character, eight an element, through all nesting
    a render  makes at most MAX_MADE_UNITS units, in at most MAX_STEPS steps: turns of a loop, calls, outputs

Counters, not clocks: the same messages pass or fail everywhere. The clock is a second line, for what steps
do not see. Knows nothing about Jinja's compiler or about messages.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

from jinja2 import Undefined
from jinja2.exceptions import SecurityError

from stages.text.errors import TemplateLimit

MAX_VALUE_UNITS: Final = 1 << 22  # a batch line has 1 MiB; marking it (chat_template.py) may triple it
MAX_MADE_UNITS: Final = 1 << 26  # 256 MiB of text, were all of it kept
ELEMENT_UNITS: Final = 8  # a reference has eight bytes, and a walk takes as long for it as for a long text
MAX_STEPS: Final = 200_000  # a step takes microseconds; twice the longest range
MAX_SECONDS: Final = 2.0  # an honest template takes milliseconds; three renders must fit into a lease
MAX_INT_BITS: Final = 1024

T = TypeVar("T")


class Budget:
    """What one render may still use."""

    def __init__(self) -> None:
        """Start the clock."""
        self._num_steps = 0
        self._num_made = 0
        self._deadline_s = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count one step."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise TemplateLimit("its number of steps", MAX_STEPS)
        if time.monotonic() > self._deadline_s:
            raise TemplateLimit("its time in seconds", MAX_SECONDS)

    def made(self, value: T) -> T:
        """Count a new value as a step and by its own units, refuse one that is too large, return it."""
        self.step()
        self._num_made += _own_units(value)
        if self._num_made > MAX_MADE_UNITS:
            raise TemplateLimit("the characters, and eight times the elements, that it may make", MAX_MADE_UNITS)
        check_size(value)
        return value

    def turns(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, each of them a step."""
        for item in items:
            self.step()
            yield item


_current: ContextVar[Budget] = ContextVar("template_budget")


@contextmanager
def fresh_budget() -> Iterator[Budget]:
    """Give the render inside a budget of its own."""
    token = _current.set(Budget())
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def budget() -> Budget:
    """Return the budget of the render that is running."""
    return _current.get()


def check_units(num_units: int) -> None:
    """Refuse a value of so many units; for results that must not even be computed."""
    if num_units > MAX_VALUE_UNITS:
        raise TemplateLimit("the size of one value, in characters and eight times its elements", MAX_VALUE_UNITS)


def check_size(value: object) -> None:
    """Refuse a value that is too large, or a container that holds anything but plain data.

    A list may hold another one twice, which holds ... : little memory, but endless when printed or compared.
    So the walk counts every visit, and stops at the limit.
    """
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateLimit("the size of an integer, in bits", MAX_INT_BITS)
    if isinstance(value, str):
        check_units(len(value))
    if isinstance(value, (list, tuple, dict)):
        _check_container(value)


def to_text(value: object) -> str:
    """Return a value as output shows it; only plain data can be shown, for other objects hold anything."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (int, float, list, tuple, dict, Undefined, type(None))):
        raise SecurityError(f"a {type(value).__name__} cannot be used as text")
    check_size(value)
    return str(value)


def _check_container(container: object) -> None:
    num_units, pending = 0, [container]
    while pending:
        value = pending.pop()
        num_units += _own_units(value)
        check_units(num_units + len(pending))
        if isinstance(value, dict):
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif not isinstance(value, (str, int, float, Undefined, type(None))):
            raise SecurityError(f"a list or dict cannot hold a {type(value).__name__}")


def _own_units(value: object) -> int:
    if isinstance(value, (list, tuple, dict)):
        return ELEMENT_UNITS * (1 + len(value))
    return len(value) if isinstance(value, str) else 1
