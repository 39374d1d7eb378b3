"""The operators, methods and filters of chat templates whose results can outgrow their operands.

Each checks the size of its result before it makes it. Owns also the list of filters there are: what real chat
templates use, and nothing that is random or formats HTML. Knows nothing about Jinja's compiler or messages.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import do_capitalize, do_indent, do_title

from stages.text.errors import TemplateLimit
from stages.text.template_budget import ELEMENT_UNITS, MAX_INT_BITS, budget, check_units, to_text

MAX_RANGE: Final = 100_000  # Jinja's sandbox has the same
MAX_INDENT: Final = 64

# Those of Jinja whose results are not larger than what they are given. `sum` may start from a list, `round`
# raises 10 to any power, `format`, `center` and their like take widths.
_AS_THEY_ARE: Final = (
    "abs", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length", "list",
    "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique",
)  # fmt: skip


def multiply(left: Any, right: Any) -> Any:
    """Return left * right, for numbers or a sequence and a number."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            per_element = 1 if isinstance(sequence, str) else ELEMENT_UNITS
            check_units(len(sequence) * max(times, 0) * per_element)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return left * right


def power(left: Any, right: Any) -> Any:
    """Return left ** right."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    return left**right


def remainder(left: Any, right: Any) -> Any:
    """Return left % right of numbers; formatting is refused, for its widths have no bound."""
    if isinstance(left, str):
        raise SecurityError("the % operator formats no text here; use ~ to put text together")
    return left % right


def join(values: Iterable[object], separator: object = "") -> str:
    """Return the values as one text."""
    texts = [to_text(value) for value in budget().turns(values)]
    between = to_text(separator)
    check_units(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def replace(value: object, old: object, new: object, count: int | None = None) -> str:
    """Return a text with occurrences of another replaced, all or the first `count`."""
    text, old_text, new_text = to_text(value), to_text(old), to_text(new)
    check_units(len(text) + text.count(old_text) * len(new_text))
    return text.replace(old_text, new_text, -1 if count is None else count)


def indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:  # noqa: FBT001, FBT002
    """Return a text with its lines indented, as Jinja's filter of this name does."""
    text = to_text(value)
    num_columns = len(width) if isinstance(width, str) else width
    if num_columns > MAX_INDENT:
        raise TemplateLimit("the width of an indent", MAX_INDENT)
    check_units(len(text) + (1 + len(text.splitlines())) * max(num_columns, 0))
    return do_indent(text, width, first, blank)


def tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON with the arguments and defaults that model publishers count on (not Jinja's: no HTML)."""
    if indent is not None and indent > MAX_INDENT:
        raise TemplateLimit("the width of an indent", MAX_INDENT)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces: list[str] = []
    num_characters = 0
    for piece in encoder.iterencode(value):
        num_characters += len(piece)
        check_units(num_characters)
        pieces.append(piece)
    return "".join(pieces)


def bounded_range(*arguments: int) -> range:
    """Return a range, if it is not too long."""
    numbers = range(*arguments)
    if len(numbers) > MAX_RANGE:
        raise TemplateLimit("the length of a range", MAX_RANGE)
    return numbers


def _trim(value: object, characters: str | None = None) -> str:
    return to_text(value).strip(characters)


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    # wraps() carries over the marks by which Jinja knows what a filter wants as its first argument.
    @wraps(function)
    def counted(*arguments: Any, **named: Any) -> Any:
        return budget().made(function(*arguments, **named))

    return counted


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INT_BITS:
        raise TemplateLimit("the size of an integer, in bits", MAX_INT_BITS)


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    name: _counted(function)
    for name, function in (
        *((name, JINJA_FILTERS[name]) for name in _AS_THEY_ARE),
        ("capitalize", lambda value: do_capitalize(to_text(value))),
        ("indent", indent),
        ("join", join),
        ("lower", lambda value: to_text(value).lower()),
        ("replace", replace),
        ("safe", to_text),  # nothing is escaped here, so nothing can be exempt from it
        ("string", to_text),
        ("title", lambda value: do_title(to_text(value))),
        ("tojson", tojson),
        ("trim", _trim),
        ("upper", lambda value: to_text(value).upper()),
    )
}
