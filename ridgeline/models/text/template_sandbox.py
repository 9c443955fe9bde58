"""The Jinja environment of chat templates: sandboxed, with the functions that templates expect, and bounded.

A template comes with the model's files, so it is untrusted code. It cannot reach Python's internals (Jinja's
immutable sandbox), and it cannot hang the server or fill its memory: its operations are charged to a budget
per render (`template_budget`), and an operation that could create a huge value is rejected beforehand.
Used only by `chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ridgeline.models.text.template_budget import (
    ITEM_CHARS,
    MAX_INTEGER_BITS,
    MAX_STEPS,
    BudgetExceeded,
    charge,
    formatted_size,
    grown_size,
    made,
    own_size,
    refuse_above,
    take,
    written_size,
)

# Names that are not valid in templates, so that only the rewritten tree uses these filters.
_TURNS, _EMIT, _TAKEN, _MADE = "loop turns", "emitted text", "taken value", "made value"
# Filters whose result is not built from their inputs, or is the input itself.
_FREE_FILTERS = {"default", "d", "length", "count", "safe", "first", "last"}
_COMPARING_TESTS = {
    *("in", "==", "eq", "equalto", "!=", "ne"),
    *("<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge"),
}


class _Metered(NodeTransformer):
    """Rewrites a parsed template so that loops, output and concatenation report to the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(_expression(node.iter), _TURNS)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_filtered(_expression(child), _EMIT) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        node.nodes = [_taken(child) for child in node.nodes]
        return _filtered(node, _MADE)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _taken(node.expr)
        for operand in node.ops:
            operand.expr = _taken(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """A slice is a copy made without the environment's hooks."""
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node


def _taken(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, _TAKEN)


def _expression(node: nodes.Node) -> nodes.Expr:
    """Literal text as a constant expression: a filter cannot be applied to TemplateData itself."""
    if isinstance(node, nodes.TemplateData):
        return nodes.Const(node.data, lineno=node.lineno)
    assert isinstance(node, nodes.Expr)
    return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# pass_context prevents Jinja's optimizer from running these once at compile time.
@jinja2.pass_context
def _charge_turns(_: Context, items: Iterable[Any]) -> list[Any]:
    turns = list(islice(items, MAX_STEPS + 1))
    charge(steps=len(turns))
    return turns


@jinja2.pass_context
def _charge_text(_: Context, value: Any) -> str:
    take((value,))
    text = str(value)
    charge(chars=len(text))
    return text


@jinja2.pass_context
def _take_value(_: Context, value: Any) -> Any:
    take((value,))
    return value


@jinja2.pass_context
def _made_value(_: Context, value: Any) -> Any:
    return made(value)


def _metered(name: str, function: Any) -> Callable[..., Any]:
    """A filter or test that charges its inputs and its result, and rejects one that would grow too large."""
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, which Jinja passes first

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        charge(steps=1)
        first, *rest = args[leading:] or (None,)
        options = (*rest, *kwargs.values())
        if name == "join":
            first = first if isinstance(first, list | tuple | str) else list(first)
            args = (*args[:leading], first, *rest)
            refuse_above(written_size(first, {}) + len(first) * sum(own_size(option) for option in options))
        elif name == "format":
            refuse_above(formatted_size(str(first), options))
        elif name in ("batch", "slice"):
            refuse_above(max([0, *(ITEM_CHARS * option for option in options if isinstance(option, int))]))
        elif isinstance(first, str | bytes):
            refuse_above(grown_size(name, first, options))
        take((first, *options))
        result = function(*args, **kwargs)
        return result if name in _FREE_FILTERS else made(result)

    return metered


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's output, for training; serving renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 (declared this way in the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block keeps names set inside local, as in the original tag.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _TemplateDict:
    """`dict(...)` for templates, without the type object and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace(...)` that rejects underscore names, which could lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: `namespace(self=…)` must work
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a template may not store {name!r} in a namespace: it starts with an underscore"
        )


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    refuse_above(indent if isinstance(indent, int) else 0)
    if indent is None and separators is None:
        return encoder.encode(value)
    # Piece by piece: only while they run can one see how far they multiply a nested value.
    return "".join([made(piece) for piece in encoder.iterencode(value)])


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the charging hooks. Compiled templates may be rendered from many threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        self.filters["tojson"] = _tojson
        for name in ("urlize", "xmlattr", "pprint"):  # for web pages; not useful in a prompt
            del self.filters[name]
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.tests |= {name: _metered(name, self.tests[name]) for name in _COMPARING_TESTS}
        self.filters |= {_TURNS: _charge_turns, _EMIT: _charge_text, _TAKEN: _take_value, _MADE: _made_value}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
        }
        del self.globals["lipsum"]  # filler text of any length; not useful in a prompt

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Metered().visit(super()._parse(source, name, filename))
        return template

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        charge(steps=1)
        if isinstance(obj, LoopContext) and args:  # a recursive loop calls itself with the next iterable
            args = (_charge_turns(context, args[0]), *args[1:])
        text, method = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(text, str | bytes):
            if method == "join" and args:
                args = (list(islice(args[0], MAX_STEPS)), *args[1:])
                refuse_above(written_size(args[0], {}) + len(args[0]) * len(text))
            refuse_above(grown_size(method, text, (*args, *kwargs.values())))
            take((text,))
        take((*args, *kwargs.values()))
        return made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox replaces `str.format` and `format_map`; their result is measured first too."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            refuse_above(formatted_size(value.__self__, (*args, *kwargs.values())))
            return formatted(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _refuse_huge_integer(operator, left, right)
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                    refuse_above(own_size(sequence) * count)
        elif operator == "%" and isinstance(left, str):
            refuse_above(formatted_size(left, right if isinstance(right, tuple) else (right,)))
        take((left, right))
        return made(super().call_binop(context, operator, left, right))


def _refuse_huge_integer(operator: str, left: int, right: int) -> None:
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}
    if bits.get(operator, 0) > MAX_INTEGER_BITS:
        raise BudgetExceeded(f"it tried to create a number of more than {MAX_INTEGER_BITS} bits")
