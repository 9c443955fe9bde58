"""The OpenAPI document as one HTML page: no script, nothing fetched from elsewhere, all text escaped."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 13px ui-monospace, monospace; } h2 code { font-size: 1em; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; }
td { vertical-align: top; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid #8884; }
summary { cursor: pointer; } details { margin: .4rem 0; } .refused, .ignored { opacity: .6; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } a { color: #8ab4f8; } }
"""


def page(document: dict[str, Any]) -> str:
    info = document["info"]
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(
        _schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())
    )
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{escape(info['description'])}</p>"
        f'<p><a href="openapi.json">openapi.json</a></p>{operations}<h1>Bodies</h1>{schemas}</body></html>'
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"]
    rows = [
        _row([f"<code>{escape(one['name'])}</code> in {one['in']}", _type(one["schema"])])
        for one in operation.get("parameters", ())
    ]
    if rows:
        parts.append(f"<table>{''.join(rows)}</table>")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body: {_type(content['schema'])} as <code>{escape(kind)}</code></p>")
    parts.append(f"<details><summary>Answers</summary><table>{_answers(operation)}</table></details>")
    return "".join(parts)


def _answers(operation: dict[str, Any]) -> str:
    return "".join(
        _row([status, escape(answer["description"]), f"<code>{escape(kind)}</code>", _type(_data(content))])
        for status, answer in operation["responses"].items()
        for kind, content in answer["content"].items()
    )


def _data(content: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = content.get("x-event-data", content["schema"])
    return schema


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f'<tr class="{field.get("x-ridgeline-status", "")}"><td><code>{escape(key)}</code>'
        f"{'' if key in required else ' ?'}</td><td>{_type(field)}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for key, field in schema.get("properties", {}).items()
    )
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    body = f"<table>{rows}</table>" if rows else f"<p>{_type(schema)}</p>"
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{about}{body}</details>'
    )


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(choice) for choice in schema[key])
    if "enum" in schema:
        return "one of " + ", ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if "items" in schema and isinstance(schema["items"], dict):
        return f"list of {_type(schema['items'])}{_bounds(schema)}"
    return escape(str(schema.get("type", "anything"))) + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    named = (
        "minimum",
        "exclusiveMinimum",
        "maximum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "maxItems",
    )
    said = [f"{key} {schema[key]}" for key in named if key in schema]
    return f" ({escape(', '.join(said))})" if said else ""


def _row(cells: list[str]) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
