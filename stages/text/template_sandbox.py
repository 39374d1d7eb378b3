"""The Jinja environment in which a model's chat template runs: immutable, counted, closed.

Owns the list of what a template can reach. Everything not listed is refused: attributes by type, filters,
globals, files. The generated code is changed in few places, so that every value made passes through
template_budget.py. Knows nothing about messages or tokens.
"""

from functools import partial
from types import BuiltinMethodType
from typing import Any, Final

from jinja2 import Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from stages.text import template_filters
from stages.text.template_budget import budget, to_text

_TEXT_METHODS: Final = frozenset({
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
    "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
# What may be touched on plain data. The template's own objects have Jinja's rules; everything else is closed.
_PLAIN_ATTRIBUTES: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (str, _TEXT_METHODS),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "index"})),
)
_TEMPLATE_OBJECTS: Final = (BlockReference, LoopContext, Macro, Namespace, TemplateReference, Undefined)
_GUARDED_METHODS: Final = {
    "join": lambda text, values: template_filters.join(values, text),
    "replace": template_filters.replace,
}


class GenerationTag(Extension):
    """`{% generation %}` marks what a model was trained on; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CountingGenerator(CodeGenerator):
    """Jinja's compiler, with a call around every expression that makes a value without calling anything."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        """Count the turns of a loop. A recursive one would take uncounted turns; no chat template has one."""
        if node.recursive:
            self.fail("recursive loops are not available", node.lineno)
        turns = nodes.EnvironmentAttribute("turns", lineno=node.lineno)
        node.iter = nodes.Call(turns, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Count the text that ~ makes."""
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        """Count a list."""
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Count a dict."""
        self.write("environment.made(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """Count a tuple, unless it is a target of an assignment."""
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.made(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Count a slice, which is a copy; an element is there already."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.made(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:  # noqa: ARG002
        # All output happens while the template runs, even literal text: in a loop it adds up.
        raise nodes.Impossible


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs one chat template; a render needs a `fresh_budget`."""

    code_generator_class = CountingGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        """Set what publishers of chat templates count on: trimmed blocks, loop controls."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            optimized=False,  # constants are folded at compile time, outside any budget
            finalize=self._output,
        )
        self.filters = dict(template_filters.FILTERS)
        self.globals = {"range": template_filters.bounded_range, "namespace": Namespace, "dict": dict}
        self.binop_table |= {
            "*": template_filters.multiply,
            "**": template_filters.power,
            "%": template_filters.remainder,
        }

    def made(self, value: Any) -> Any:
        """Count a value that generated code has made."""
        return budget().made(value)

    def turns(self, items: Any) -> Any:
        """Count the turns of a loop."""
        return budget().turns(items)

    def concatenate(self, values: tuple[object, ...]) -> str:
        """Do what the ~ operator does."""
        return budget().made(template_filters.join(values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator of `intercepted_binops`."""
        return budget().made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Run a call; the first parameters have Jinja's names, for the keywords are the template's."""
        budget().step()
        return budget().made(super().call(__context, _guarded(__obj), *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow what is listed above."""
        for type_, allowed in _PLAIN_ATTRIBUTES:
            if isinstance(obj, type_):
                return attr in allowed
        return isinstance(obj, _TEMPLATE_OBJECTS) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Leave str.format to `is_safe_attribute`, which refuses it: Jinja's own wrapper would come first."""

    @staticmethod
    def _output(value: object) -> str:
        return budget().made(to_text(value))


def _guarded(callee: Any) -> Any:
    if isinstance(callee, BuiltinMethodType) and isinstance(callee.__self__, str):
        guarded = _GUARDED_METHODS.get(callee.__name__)
        return callee if guarded is None else partial(guarded, callee.__self__)
    return callee
