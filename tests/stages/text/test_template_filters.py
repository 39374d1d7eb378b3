"""The operators and filters of templates refuse a result before they make it: no budget is needed for that."""

from collections.abc import Callable, Iterator

import pytest

from stages.text.errors import TemplateLimit
from stages.text.template_budget import check_size, fresh_budget
from stages.text.template_filters import FILTERS, bounded_range, indent, join, multiply, power, replace, tojson


@pytest.fixture(autouse=True)
def _budget() -> Iterator[None]:
    with fresh_budget():
        yield


@pytest.mark.parametrize(
    "operation",
    [
        lambda: multiply("ab", 10**12),
        lambda: multiply(10**12, [0]),
        lambda: multiply((0,), 10**12),
        lambda: multiply(1 << 600, 1 << 600),
        lambda: power(7, 10**12),
        lambda: replace("a" * 1000, "a", "b" * 10**6),
        lambda: replace("a" * 1000, "", "b" * 10**6),
        lambda: join(["a" * 10**6] * 1000),
        lambda: join(["a"] * 1000, "b" * 10**6),
        lambda: indent("a\n" * 10**6, 60),
        lambda: indent("a", 10**12),
        lambda: tojson(["a" * 10**6] * 1000),
        lambda: tojson([1], indent=10**12),
        lambda: bounded_range(10**12),
        lambda: check_size([["a" * 10**6] * 1000]),
        lambda: check_size(1 << 2000),
    ],
)
def test_large_result_is_refused_before_it_is_made(operation: Callable[[], object]) -> None:
    with pytest.raises(TemplateLimit):
        operation()


def test_results_are_those_of_python() -> None:
    assert multiply("ab", 2) == "abab"
    assert multiply(3, 2.5) == 7.5
    assert multiply("ab", -1) == ""
    assert power(2, -1) == 0.5
    assert power(2.0, 3) == 8.0
    assert replace("aaa", "a", "b", 2) == "bba"
    assert join([1, None, "a"], "-") == "1-None-a"
    assert list(bounded_range(3, 0, -1)) == [3, 2, 1]


def test_json_is_as_publishers_expect_it() -> None:
    assert tojson({"b": "é<'&", "a": [1.5, None]}) == '{"b": "é<\'&", "a": [1.5, null]}'
    assert tojson({"b": 1, "a": "é"}, ensure_ascii=True, sort_keys=True, separators=(",", ":")) == (
        '{"a":"\\u00e9","b":1}'
    )


def test_nothing_random_or_unbounded_is_listed() -> None:
    assert {"tojson", "trim", "join", "length"} <= set(FILTERS)
    assert not {"random", "format", "center", "sum", "round", "attr", "pprint"} & set(FILTERS)
