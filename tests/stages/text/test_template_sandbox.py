"""Hostile and broken templates: each ends in an error of ours, soon, and with little memory."""

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from stages.text import template_budget
from stages.text.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplate
from stages.text.errors import TemplateFailed, TemplateInvalid, TemplateLimit, TemplateRejected


@dataclass(frozen=True)
class Said:
    role: str
    content: str


def render(source: str) -> str:
    return ChatTemplate(source).render([Said("user", "x")], now=datetime(2025, 1, 1, tzinfo=UTC)).text


def _doubling(step: str) -> str:
    return f"{{% set ns = namespace(x='aa', l=[1]) %}}{{% for _ in range(60) %}}{step}{{% endfor %}}"


LIMITS = {
    "nested_loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long_range": "{{ range(10**9) | length }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "add": _doubling("{% set ns.x = ns.x + ns.x %}"),
    "tilde": _doubling("{% set ns.x = ns.x ~ ns.x %}"),
    "block": _doubling("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "join": _doubling("{% set ns.x = [ns.x, ns.x] | join %}"),
    "join_method": _doubling("{% set ns.x = ns.x.join(['a', 'b', 'c']) %}"),
    "replace": _doubling("{% set ns.x = ns.x | replace('a', 'aa') %}"),
    "replace_method": _doubling("{% set ns.x = ns.x.replace('a', 'aa') %}"),
    "json": _doubling("{% set ns.x = ns.x | tojson | tojson %}"),
    "indent": "{{ ('a\n' * 1000000) | indent(60) }}",
    "add_lists": _doubling("{% set ns.l = ns.l + ns.l %}"),
    "nest_lists": _doubling("{% set ns.l = [ns.l, ns.l] %}"),
    "nest_tuples": _doubling("{% set ns.l = (ns.l, ns.l) %}"),
    "nest_dicts": _doubling("{% set ns.l = {'a': ns.l, 'b': ns.l} %}"),
    "multiply_text": "{{ 'a' * 10**9 }}",
    "multiply_list": "{{ ([0] * 10**9) | length }}",
    "multiply_numbers": _doubling("{% set ns.n = (ns.n or 7) * (ns.n or 7) %}"),
    "power": "{{ 10 ** 10000000 }}",
    "wide_indent": "{{ 'a' | indent(10**9, true) }}",
    "wide_json": "{{ [1] | tojson(indent=10**9) }}",
    "literal_in_loop": "{% for _ in range(90000) %}" + "a" * 5000 + "{% endfor %}",
    "literal_in_hidden_loop": "{% set x %}{% for _ in range(90000) %}" + "a" * 5000 + "{% endfor %}{% endset %}",
    "slices": "{% set x = 'a' * 4000000 %}" + "{% set y = x[1:] %}" * 20,
}


@pytest.mark.parametrize("source", LIMITS.values(), ids=LIMITS)
def test_counters_stop_what_grows_without_bound(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 1e6)
    with pytest.raises(TemplateLimit, match=r"^the chat template exceeds .*: at most [\d,]+$"):
        render(source)


REFUSED = {
    "class": "{{ ''.__class__ }}!{{ ''.__class__.__mro__ }}",
    "item": "{{ ''['__class__']['__mro__'] }}",
    "attr_of_method": "{{ messages.append.__self__ }}",
    "mutation": "{{ messages.append(1) }}",
    "dict_mutation": "{{ messages[0].update({'role': 'system'}) }}",
    "globals": "{{ raise_exception.__globals__.x }}",
    "globals_of_clock": "{{ strftime_now.__closure__[0] }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m._func.x }}",
    "self": "{{ self._TemplateReference__context.x }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "loop": "{% for a in [1] %}{{ loop._iterator.x }}{% endfor %}",
    "generator": "{{ (messages | map('lower')).gi_frame.f_back }}",
    "type": "{{ dict.fromkeys([1]) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent_via_map": "{{ ['%s'] | map('format', 1) | list }}",
    "int_method": "{{ (1).to_bytes(1000000000, 'big') }}",
    "text_method": "{{ 'a'.center(1000000000) }}",
    "encode": "{{ 'a'.encode('idna') }}",
    "print_namespace": "{{ namespace(a=1) }}",
    "hide_namespace": "{{ [namespace(a=1)] }}",
    "print_function": "{{ raise_exception }}",
    "text_of_function": "{{ raise_exception ~ '' }}",
    "deep_recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "no_such_global": "{{ lipsum() }}",
    "undefined_attribute": "{{ nothing.at.all }}",
    "types": "{{ 'a' + 1 }}",
    "division": "{{ 1 / 0 }}",
    "unjsonable": "{{ nothing | tojson }}",
    "unsortable": "{{ [1, 'a'] | sort }}",
    "not_iterable": "{% for a in 5 %}{% endfor %}",
    "long_number": "{{ ('9' * 5000) | int * 1.5 }}{{ {}['x'] | abs }}",
    "unpacking": "{% for a, b in [[1, 2, 3]] %}{% endfor %}",
    "time_of_nothing": "{{ strftime_now() }}",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_what_a_template_must_not_do_fails(source: str) -> None:
    with pytest.raises((TemplateFailed, TemplateInvalid, TemplateLimit)) as caught:
        render(source)
    assert str(caught.value).startswith("the chat template ")


INVALID = {
    "syntax": "line one\n{% if %}",
    "unclosed": "{% for a in b %}",
    "unknown_tag": "{% do x %}",
    "unknown_filter": "{{ 'a' | center(10) }}",
    "random_filter": "{{ [1, 2] | random }}",
    "recursive_loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "deep_expression": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep_blocks": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "huge_number": "{{ " + "9" * 5000 + " }}",
    "too_long": "a" * (MAX_SOURCE_CHARACTERS + 1),
}


@pytest.mark.parametrize("source", INVALID.values(), ids=INVALID)
def test_what_is_no_template_is_refused_before_it_runs(source: str) -> None:
    with pytest.raises(TemplateInvalid, match="the chat template"):
        ChatTemplate(source)


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(TemplateInvalid, match="line 2"):
        ChatTemplate(INVALID["syntax"])


def test_rejection_carries_the_templates_words() -> None:
    with pytest.raises(TemplateRejected, match="does not accept these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_clock_stops_what_the_counters_do_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(template_budget.time, "monotonic", lambda: next(ticks) * 1.0)
    with pytest.raises(TemplateLimit, match="its time in seconds: at most 2"):
        render("{{ 1 }}{{ 2 }}{{ 3 }}{{ 4 }}")


ORDINARY = {
    "{{ [1, 2.5, none, true, 'a'] }}": "[1, 2.5, None, True, 'a']",
    "{{ 7 % 4 }} {{ 2 ** 3 }} {{ 3 * 'ab' }} {{ 2 * 3.5 }}": "3 8 ababab 7.0",
    "{{ 1 ~ 'a' ~ none ~ nothing }}": "1aNone",
    "{{ 'é<' | tojson }}{{ {'b': 1, 'a': [true]} | tojson(indent=1) }}": '"é<"{\n "b": 1,\n "a": [\n  true\n ]\n}',
    "{{ ['b', 'a'] | sort | join(', ') }} {{ ', '.join(['a', 'b']) }}": "a, b a, b",
    "{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'equalto', 2) | map(attribute='a') | list }}": "[2]",
    "{% for key, value in {'a': 1, 'b': 2}.items() %}{{ key }}{{ value }}{% endfor %}": "a1b2",
    "{% for key, value in {'b': 1, 'a': 2} | dictsort %}{{ key }}{{ loop.last }}{% endfor %}": "aFalsebTrue",
    "{% for a in [1, 2, 3] if a != 2 %}{{ a }}/{{ loop.length }}{% endfor %}": "1/23/2",
    "{% for a in nothing %}x{% else %}none{% endfor %}": "none",
    "{{ messages[0].role }} {{ messages[-1]['content'] }} {{ messages[1:] | length }}": "user x 0",
    "{{ messages[0].get('tool', 'no') }} {{ 'tool' in messages[0] }} {{ messages is iterable }}": "no False True",
    "{{ 'a\nb' | indent(2) }} {{ 'abca' | replace('a', 'x', 1) }} {{ 'ab' | upper | lower | title }}": "a\n  b xbca Ab",
    "{{ ' a ' | trim }} {{ 'xax' | trim('x') }} {{ 'a b'.split(' ')[1] }} {{ 'abc'[::-1] }}": "a a b cba",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}": "12",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}!{% endcall %}": "!",
    "{% set a, b = 1, [2] %}{{ a }}{{ b[0] }}{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}": "122",
    "{{ '3' | int + 1 }} {{ -3 | abs }} {{ [3, 1] | max }} {{ nothing | default('d') }}": "4 3 3 d",
    "{% for a in 'a,b'.split(',') %}{{ a.replace('b', 'c', 1) }}{{ '-'.join(['x', a]) }}{% endfor %}": "ax-acx-b",
    "{% filter upper %}a{{ 'b' }}{% endfilter %} {{ 'a' if false }} {{ dict(a=1).a }}": "AB  1",
}


@pytest.mark.parametrize(("source", "shown"), ORDINARY.items(), ids=range(len(ORDINARY)))
def test_ordinary_templates_mean_what_jinja_means(source: str, shown: str) -> None:
    assert render(source) == shown
