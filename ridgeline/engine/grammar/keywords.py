"""Which JSON schemas can be promised: a keyword is enforced, or an annotation, or refused by its name.

`prepared_schema` is called where a schema comes in, by the server and by the in-process `LLM`. It walks the
schema, within limits, and writes what is left to the grammar library: nothing that the library would ignore,
or read more loosely than a validator does. It compiles nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.patterns import DATE, DATE_TIME, TIME, strict_pattern

MAX_SCHEMA_BYTES = 128 << 10
MAX_DEPTH = 64
MAX_SUBSCHEMAS = 4_000
MAX_PROPERTIES = 1_000
MAX_ENUM_VALUES = 5_000
MAX_COUNT = 1_000_000  # minItems, maxLength and their like
MAX_PATTERN_BYTES = 4096
MAX_EMBEDDED = 32  # schemas in one Lark grammar


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ANNOTATIONS = _words(
    "title description default examples example $comment deprecated readOnly writeOnly discriminator"
)
ENFORCED = _words(
    "type enum const properties required additionalProperties patternProperties items prefixItems"
    " additionalItems minItems maxItems minProperties maxProperties minLength maxLength pattern format"
    " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf allOf anyOf oneOf"
    " $ref $defs definitions $anchor $schema $id id"
)
KNOWN_UNSUPPORTED = _words(
    "not if then else contains minContains maxContains uniqueItems propertyNames dependencies"
    " dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties contentEncoding"
    " contentMediaType contentSchema $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor $vocabulary"
    " extends disallow divisibleBy"
)
DRAFTS = frozenset(
    {
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-04/schema",
    }
)
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
TYPES = _words("string number integer boolean null object array")

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of names to schemas
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("additionalProperties", "additionalItems", "items")
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
# Formats that the library reads by their letters: the 29th of February of any year, the 61st second.
_STRICT_FORMATS = {"date": DATE, "time": TIME, "date-time": DATE_TIME}


def schema_grammar(schema: Any) -> Grammar:
    """The grammar of the JSON texts that the schema allows.

    Raises InvalidRequest whose `field` is the path within the schema ("" for the schema itself).
    """
    return Grammar("json_schema", prepared_schema(schema))


def prepared_schema(schema: Any) -> str:
    """The schema as JSON text for the library; raises as `schema_grammar` does."""
    try:
        size = len(json.dumps(schema, ensure_ascii=False).encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest("", f"is not JSON: {error}") from None
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest("", f"has {size} bytes; at most {MAX_SCHEMA_BYTES} can be served")
    return json.dumps(_Walk().schema(schema, (), 0), ensure_ascii=False)


def prepared(grammar: Grammar) -> Grammar:
    """A grammar that came from elsewhere than `schema_grammar`, with its schema, if it is one, checked."""
    if grammar.kind != "json_schema":
        return grammar
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("grammar", f"is not JSON: {error}") from None
    try:
        return schema_grammar(schema)
    except InvalidRequest as error:
        raise InvalidRequest(f"grammar.{error.field}".rstrip("."), error.message) from None


class _Walk:
    """One pass over a schema, with what it has counted so far."""

    def __init__(self) -> None:
        self._subschemas = self._properties = self._enum_values = 0

    def schema(self, schema: Any, path: tuple[str, ...], depth: int) -> Any:
        self._subschemas += 1
        _check(depth <= MAX_DEPTH, path, f"is nested deeper than {MAX_DEPTH} schemas")
        _check(self._subschemas <= MAX_SUBSCHEMAS, path, f"is one of more than {MAX_SUBSCHEMAS} schemas")
        if isinstance(schema, bool):
            return schema
        _check(isinstance(schema, dict), path, "must be a schema: an object, true or false")
        written: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
                continue
            if keyword == "uniqueItems" and value is False:
                continue
            here = (*path, keyword)
            _check(keyword not in KNOWN_UNSUPPORTED, here, f"the keyword {keyword!r} is not supported")
            _check(
                keyword in ENFORCED, here, f"{keyword!r} is not a keyword of JSON Schema that is known here"
            )
            written[keyword] = self._value(keyword, value, here, depth)
        return _with_strict_format(written, path)

    def _value(self, keyword: str, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if keyword in _MAPS:
            _check(isinstance(value, dict), path, "must be an object of schemas")
            return self._map(keyword, value, path, depth)
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            _check(isinstance(value, list), path, "must be an array of schemas")
            return [self.schema(one, (*path, f"[{i}]"), depth + 1) for i, one in enumerate(value)]
        if keyword in _SINGLE:
            return self.schema(value, path, depth + 1)
        return self._plain(keyword, value, path)

    def _map(self, keyword: str, value: dict[str, Any], path: tuple[str, ...], depth: int) -> Any:
        if keyword in ("properties", "patternProperties"):
            self._properties += len(value)
            _check(self._properties <= MAX_PROPERTIES, path, f"makes more than {MAX_PROPERTIES} properties")
        written = {}
        for name, one in value.items():
            here = (*path, name)
            key = _pattern(name, here) if keyword == "patternProperties" else name
            written[key] = self.schema(one, here, depth + 1)
        return written

    def _plain(self, keyword: str, value: Any, path: tuple[str, ...]) -> Any:
        """A keyword whose value holds no schema."""
        if keyword == "enum":
            _check(isinstance(value, list) and bool(value), path, "must be an array with at least one value")
            self._enum_values += len(value)
            _check(self._enum_values <= MAX_ENUM_VALUES, path, f"makes more than {MAX_ENUM_VALUES} values")
        elif keyword in _COUNTS:
            number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            _check(number and value == int(value), path, "must be a whole number, not negative")
            _check(value <= MAX_COUNT, path, f"is {value}; at most {MAX_COUNT} can be served")
            return int(value)
        elif keyword == "pattern":
            return _pattern(value, path)
        elif keyword == "format":
            _check(isinstance(value, str) and value in FORMATS, path, _unknown("format", value, FORMATS))
        elif keyword == "type":
            for one in value if isinstance(value, list) else [value]:
                _check(isinstance(one, str) and one in TYPES, path, _unknown("type", one, TYPES))
        elif keyword == "$ref":
            _check(isinstance(value, str), path, "must be a string")
            _check(
                value.startswith("#"), path, f"points outside of the schema ({value[:100]!r}): not followed"
            )
        elif keyword == "$schema":
            known = isinstance(value, str) and value.removesuffix("#") in DRAFTS
            _check(known, path, _unknown("draft", value, DRAFTS))
        elif keyword in ("$id", "id"):
            _check(len(path) == 1, path, "names a schema within a schema, which is not supported")
        return value


def _with_strict_format(written: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    strict = _STRICT_FORMATS.get(written.get("format", ""))
    if strict is None:
        return written
    _check("pattern" not in written, (*path, "format"), "is not supported together with 'pattern'")
    del written["format"]
    written["pattern"] = strict
    return written


def _pattern(value: Any, path: tuple[str, ...]) -> str:
    _check(isinstance(value, str), path, "must be a regular expression")
    _check(len(value.encode()) <= MAX_PATTERN_BYTES, path, f"is longer than {MAX_PATTERN_BYTES} bytes")
    _check("\0" not in value, path, "contains a null character")
    return strict_pattern(value)


def _unknown(what: str, value: Any, known: frozenset[str]) -> str:
    return f"the {what} {str(value)[:100]!r} is not supported; known are {', '.join(sorted(known))}"


def _check(ok: bool, path: tuple[str, ...], message: str) -> None:
    if not ok:
        raise InvalidRequest(".".join(path).replace(".[", "[")[:500], message)


_EMBEDDED = re.compile(r"%json\s*(?=[\[{])")


def refuse_embedded(lark: str) -> None:
    """Check the schemas that a Lark grammar embeds with %json."""
    decoder = json.JSONDecoder()
    for count, found in enumerate(_EMBEDDED.finditer(lark)):
        _check(count < MAX_EMBEDDED, (), f"there are more than {MAX_EMBEDDED} of them")
        try:
            schema, _ = decoder.raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue  # the library says what is wrong with it
        prepared_schema(schema)
