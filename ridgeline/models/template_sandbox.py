"""The Jinja environment chat templates run in: sandboxed, with the functions templates expect, and bounded.

A template comes with the model's files, so it is code from strangers. It cannot reach Python's internals
(Jinja's immutable sandbox), and it cannot hang or fill the server: loop turns, calls and emitted characters
are charged to a budget per render, and operations that could make a huge value in one go are refused first.
Used by `chat_template` alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000  # loop turns and calls in one render: one or two seconds at most
MAX_CHARS = 32_000_000  # characters emitted in one render, and the length of any one value
MAX_POWER_BITS = 4096

# Names no template can spell, so that only the rewritten tree uses these filters.
_TURNS, _EMIT, _BOUND = "loop turns", "emitted text", "bounded value"
_SIZED_METHODS = {"ljust", "rjust", "center", "zfill", "expandtabs"}
_WIDE_FIELD = re.compile(r"\d{8,}")
_SIZED_FILTERS = ("center", "indent", "wordwrap", "truncate", "batch", "slice", "tojson", "format")


class BudgetExceeded(Exception):
    """The render went over a bound; the message says which."""


class _Budget:
    def __init__(self) -> None:
        self.steps = 0
        self.chars = 0

    def charge(self, steps: int = 0, chars: int = 0) -> None:
        self.steps += steps
        self.chars += chars
        if self.steps > MAX_STEPS:
            raise BudgetExceeded(f"it took more than {MAX_STEPS:,} loop turns and calls")
        if self.chars > MAX_CHARS:
            raise BudgetExceeded(f"it wrote more than {MAX_CHARS:,} characters")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


@contextmanager
def render_budget() -> Iterator[None]:
    """A fresh budget for the renders inside; every template of this environment must run within one."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


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
        return _filtered(node, _BOUND)


def _expression(node: nodes.Node) -> nodes.Expr:
    """Literal text as a constant expression: a filter cannot be applied to TemplateData itself."""
    if isinstance(node, nodes.TemplateData):
        return nodes.Const(node.data, lineno=node.lineno)
    assert isinstance(node, nodes.Expr)
    return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# pass_context keeps Jinja's optimizer from running these once, at compile time.
@jinja2.pass_context
def _charge_turns(_: Context, items: Iterable[Any]) -> list[Any]:
    turns = list(items)
    _budget.get().charge(steps=len(turns))
    return turns


@jinja2.pass_context
def _charge_text(_: Context, value: Any) -> str:
    text = str(value)
    _budget.get().charge(chars=len(text))
    return text


@jinja2.pass_context
def _check_value(_: Context, value: Any) -> Any:
    return _bounded(value)


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARS:
        raise BudgetExceeded(f"it built a value longer than {MAX_CHARS:,}")
    return value


def _refuse_huge_sizes(arguments: Iterable[Any]) -> None:
    if any(isinstance(argument, int) and abs(argument) > MAX_CHARS for argument in arguments):
        raise BudgetExceeded(f"it asked for a value longer than {MAX_CHARS:,}")


def _refuse_huge_power(base: int, exponent: int) -> None:
    if base.bit_length() * exponent > MAX_POWER_BITS:
        raise BudgetExceeded(f"it asked for a power of more than {MAX_POWER_BITS} bits")


def _refuse_wide_format(form: str, arguments: Iterable[Any]) -> None:
    """Widths stand in the format string itself, or among the arguments."""
    if _WIDE_FIELD.search(form):
        raise BudgetExceeded(f"it asked for a value longer than {MAX_CHARS:,}")
    _refuse_huge_sizes(arguments)


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing widths and counts that would fill memory."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value, *sizes = args
        if function.__name__ == "do_format":
            _refuse_wide_format(str(value), sizes)
        _refuse_huge_sizes((*sizes, *kwargs.values()))
        return _bounded(function(*args, **kwargs))

    return checked


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model said, for training; serving renders its body as it stands."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, so that names set inside stay inside, as where the tag comes from.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _TemplateDict:
    """`dict(...)` for templates, without the type object and what hangs off it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace(...)` that refuses underscore names, a road to Python's internals."""

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
    """Jinja's own filter escapes HTML, which is not what models were trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the charging hooks. Compiled templates may be rendered from many threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        self.filters["tojson"] = _tojson
        for name in _SIZED_FILTERS:
            self.filters[name] = _sized(self.filters[name])
        self.filters |= {_TURNS: _charge_turns, _EMIT: _charge_text, _BOUND: _check_value}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
        }
        del self.globals["lipsum"]  # filler text of any length, of no use in a prompt

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Metered().visit(super()._parse(source, name, filename))
        return template

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().charge(steps=1)
        if isinstance(obj, LoopContext) and args:  # a recursive loop calls itself with the next iterable
            args = (_charge_turns(context, args[0]), *args[1:])
        is_text_method = isinstance(getattr(obj, "__self__", None), str)
        if is_text_method and getattr(obj, "__name__", "") in _SIZED_METHODS:
            _refuse_huge_sizes(args)
        return _bounded(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox swaps in its own `str.format` and `format_map`; they get the width check too."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _refuse_wide_format(value.__self__, (*args, *kwargs.values()))
            return formatted(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _refuse_huge_sizes((len(sequence) * count,))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_huge_power(left, right)
        if operator == "%" and isinstance(left, str):
            _refuse_wide_format(left, right if isinstance(right, tuple) else (right,))
        return _bounded(super().call_binop(context, operator, left, right))
