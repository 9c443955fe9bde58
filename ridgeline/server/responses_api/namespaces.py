"""The functions offered to the model, including those in namespaces, which Codex uses for functions of MCP
servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.server.errors import BadRequest
from ridgeline.server.responses_api.protocol import FunctionTool, NamespaceTool, ResponseTool
from ridgeline.web.response_tools import flat_name


@dataclass(frozen=True, slots=True)
class Offered:
    """A function offered to the model: its name for the model, and its path in the client's body."""

    name: str
    tool: FunctionTool
    path: str
    namespace: NamespaceTool | None = None

    @property
    def description(self) -> str | None:
        """The first function of a namespace carries the namespace's description."""
        own = self.tool.description
        if self.namespace is None or self.namespace.tools[0] is not self.tool:
            return own
        return "\n".join(text for text in (self.namespace.description, own) if text) or None


def offered(tools: Sequence[ResponseTool] | None) -> list[Offered]:
    return list(_offered(tools or ()))


def _offered(tools: Sequence[ResponseTool]) -> Iterator[Offered]:
    for i, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            yield Offered(tool.name, tool, f"tools[{i}]")
        elif isinstance(tool, NamespaceTool):
            for j, inner in enumerate(tool.tools):
                yield Offered(flat_name(tool.name, inner.name), inner, f"tools[{i}].tools[{j}]", tool)


def called(name: str, functions: Sequence[Offered], path: str) -> str:
    """The flat name of a function that the client names with or without its namespace."""
    if any(function.name == name for function in functions):
        return name
    meant = [function.name for function in functions if function.tool.name == name]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise BadRequest(path, f"several namespaces have {name[:64]!r}; write one of {', '.join(meant)}")
    raise BadRequest(path, f"{name[:64]!r} is not one of the functions in tools")


Homes = Mapping[str, tuple[str, str]]  # by a function's flat name: its namespace and its own name


def homes(tools: Sequence[ResponseTool] | None) -> Homes:
    return {
        function.name: (function.namespace.name, function.tool.name)
        for function in offered(tools)
        if function.namespace is not None
    }
