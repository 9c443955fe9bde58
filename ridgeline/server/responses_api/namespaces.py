"""The functions that a response's model is offered, with those in namespaces, as Codex sends the functions of
MCP servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.server.errors import BadRequest
from ridgeline.server.responses_api.protocol import FunctionTool, NamespaceTool, ResponseTool
from ridgeline.web.response_tools import flat_name


@dataclass(frozen=True, slots=True)
class Offered:
    """A function that the model is offered: under which name, and where the client wrote it."""

    name: str
    tool: FunctionTool
    path: str
    namespace: NamespaceTool | None = None

    @property
    def description(self) -> str | None:
        """The first function of a namespace brings the namespace's own description."""
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
    """The flat name of a function that the client names without its namespace, or with it."""
    if any(function.name == name for function in functions):
        return name
    meant = [function.name for function in functions if function.tool.name == name]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise BadRequest(path, f"several namespaces have {name[:64]!r}; write one of {', '.join(meant)}")
    raise BadRequest(path, f"{name[:64]!r} is none of the functions of tools")


Homes = Mapping[str, tuple[str, str]]  # by a function's flat name: its namespace and its own name


def homes(tools: Sequence[ResponseTool] | None) -> Homes:
    return {
        function.name: (function.namespace.name, function.tool.name)
        for function in offered(tools)
        if function.namespace is not None
    }
