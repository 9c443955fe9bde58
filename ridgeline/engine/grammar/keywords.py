"""Which JSON schemas are served: a keyword is enforced, checked afterwards, ignored, or rejected by name.

`schema_grammar` is called by the server and by the in-process `LLM` when a schema arrives. It reads the
schema within limits and rewrites it as standard JSON Schema; `enforced` decides which part the grammar
library enforces, `conformance` checks the rest when the answer is complete. Nothing is compiled here.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.enforced import CHECKED_FORMATS, LIBRARY_FORMATS, Enforced

MAX_SCHEMA_BYTES = 128 << 10
MAX_DEPTH = 64
MAX_SUBSCHEMAS = 4_000
MAX_PROPERTIES = 1_000
MAX_ENUM_VALUES = 5_000
MAX_COUNT = 1_000_000  # minItems, maxLength and the like
MAX_PATTERN_BYTES = 4096
MAX_EMBEDDED = 32  # schemas in one Lark grammar
MAX_IGNORED = 16  # keywords that are reported


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ANNOTATIONS = _words(
    "title description default examples example $comment deprecated readOnly writeOnly discriminator"
)
KEYWORDS = _words(
    "type enum const properties required additionalProperties patternProperties items prefixItems"
    " additionalItems minItems maxItems minProperties maxProperties minLength maxLength pattern format"
    " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf allOf anyOf oneOf nullable"
    " $ref $defs definitions $anchor $schema $id id"
    " not if then else contains minContains maxContains uniqueItems propertyNames dependencies"
    " dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties"
    " contentEncoding contentMediaType x-ridgeline-unbounded"
)
REFUSED = _words("$dynamicRef $recursiveRef $recursiveAnchor extends disallow divisibleBy x-guidance")
DRAFTS = {  # with a number that orders them
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 8,
    "https://json-schema.org/draft/2020-12/schema": 9,
}
# The draft in which a keyword was introduced; validators of older drafts ignore it.
SINCE = {
    **dict.fromkeys(("contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else", "contentEncoding", "contentMediaType"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 8),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), 8),
}
INTEGER_FORMATS = frozenset({"int32", "int64"})
TYPES = _words("string number integer boolean null object array")

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = _words(
    "additionalProperties additionalItems items not if then else contains propertyNames unevaluatedItems"
    " unevaluatedProperties"
)
_COUNTS = _words("minItems maxItems minProperties maxProperties minLength maxLength minContains maxContains")
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_NOTHING = object()
_TUPLE = "items, as an array"


@dataclass(frozen=True)
class ReadSchema:
    """A parsed schema: the same constraints in standard keywords, and the keywords left out."""

    schema: Any
    ignored: tuple[str, ...] = ()
    draft: str = "https://json-schema.org/draft/2020-12/schema"


def schema_grammar(schema: Any) -> Grammar:
    """The grammar of the JSON texts that the schema allows.

    Raises InvalidRequest whose `field` is the path within the schema ("" for the schema itself).
    """
    read = read_schema(schema)
    enforced = Enforced(read.schema)
    written, check = enforced.written, ""
    unknown = [word for word in enforced.checked if SINCE.get(word, 0) > DRAFTS[read.draft]]
    for word in unknown:
        del enforced.checked[word]
    if enforced.checked:
        check = json.dumps(_with_draft(read), ensure_ascii=False)
    if "oneOf" in enforced.checked:
        # Branches that may overlap are served as anyOf; the check finds an answer that matches two of them.
        written = {**written, "x-guidance": {"coerce_one_of": True}}
    source = json.dumps(written, ensure_ascii=False)
    checked = tuple(sorted(enforced.checked))
    ignored = (*read.ignored, *unknown)
    return Grammar("json_schema", source, check, ignored, checked, is_prepared=True)


def enforced_schema(schema: Any, strict: bool) -> Any:
    """The schema in the library's form, for a grammar that embeds it and checks nothing afterwards.

    strict: raises as `schema_grammar` does, and also for a keyword that can only be checked.
    """
    enforced = Enforced(read_schema(schema).schema)
    if strict:
        _refuse_unenforced(enforced.checked)
    return enforced.written


def prepared(grammar: Grammar) -> Grammar:
    """A grammar that was not made by `schema_grammar`; if it has a schema, the schema is checked."""
    if grammar.kind != "json_schema" or grammar.is_prepared:
        return grammar
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("grammar", f"is not JSON: {error}") from None
    try:
        return schema_grammar(schema)
    except InvalidRequest as error:
        raise InvalidRequest(f"grammar.{error.field}".rstrip("."), error.message) from None


def read_schema(schema: Any) -> ReadSchema:
    """Raises InvalidRequest for a schema beyond the limits, or with an unsupported keyword."""
    try:
        size = len(json.dumps(schema, ensure_ascii=False).encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest("", f"is not JSON: {error}") from None
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest("", f"has {size} bytes; the limit is {MAX_SCHEMA_BYTES}")
    reader = _Reader(schema)
    read = reader.schema(schema, (), 0)
    return ReadSchema(read, tuple(reader.ignored), reader.draft or _inferred_draft(reader.words))


def _inferred_draft(words: set[str]) -> str:
    """The newest draft in which these keywords have their intended meaning, if the schema names none."""
    newest, older, oldest = (url for url, _ in sorted(DRAFTS.items(), key=lambda one: -one[1])[:3])
    if {_TUPLE, "additionalItems"} & words:
        _check(
            "prefixItems" not in words, ("prefixItems",), "cannot be combined with 'items' of an older draft"
        )
    elif not {"contentEncoding", "contentMediaType", "dependencies"} & words:
        return newest
    is_new = any(SINCE.get(word, 0) == DRAFTS[older] for word in words)
    return older if is_new else oldest


def _with_draft(read: ReadSchema) -> Any:
    return {"$schema": read.draft, **read.schema} if isinstance(read.schema, dict) else read.schema


@dataclass
class _References:
    """The targets of the document's $refs, collected first: an id that no $ref needs is ignored."""

    targets: set[str] = field(default_factory=set)

    def collect(self, value: Any, depth: int = 0) -> None:
        if depth > 4 * MAX_DEPTH:
            return
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str):
                self.targets.add(target)
            for one in value.values():
                self.collect(one, depth + 1)
        elif isinstance(value, list):
            for one in value:
                self.collect(one, depth + 1)


class _Reader:
    """One pass over a schema, with its counters."""

    def __init__(self, root: Any) -> None:
        self._subschemas = self._properties = self._enum_values = 0
        self._references = _References()
        self._references.collect(root)
        self._own_ids = _own_ids(root)
        self._unknown: set[str] = set()
        self.ignored: dict[str, None] = {}  # in order of appearance
        self.words: set[str] = set()
        self.draft = ""  # as named by the schema

    def schema(self, schema: Any, path: tuple[str, ...], depth: int) -> Any:
        self._subschemas += 1
        _check(depth <= MAX_DEPTH, path, f"is nested deeper than {MAX_DEPTH} schemas")
        _check(self._subschemas <= MAX_SUBSCHEMAS, path, f"is one of more than {MAX_SUBSCHEMAS} schemas")
        if isinstance(schema, bool):
            return schema
        _check(isinstance(schema, dict), path, "must be a schema: an object, true or false")
        read: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in ANNOTATIONS:
                continue
            here = (*path, keyword)
            _check(keyword not in REFUSED, here, f"the keyword {keyword!r} is not supported")
            if keyword not in KEYWORDS:
                self._ignore(keyword)
                continue
            if keyword in ("$id", "id"):
                self._check_id(value, schema, here)
                continue
            self.words.add(_TUPLE if keyword == "items" and isinstance(value, list) else keyword)
            kept = self._value(keyword, value, here, depth)
            if kept is not _NOTHING:
                read[keyword] = kept
        return self._standard(read, path)

    def _ignore(self, word: str) -> None:
        """A keyword that looks misspelt is reported with the correct one."""
        if word.startswith("x-") or word in self._unknown or len(self.ignored) >= MAX_IGNORED:
            return
        self._unknown.add(word)
        meant = difflib.get_close_matches(word[:40], KEYWORDS, 1, cutoff=0.85)
        self.ignored[f"{word[:40]} ({meant[0]}?)" if meant else word[:40]] = None

    def _value(self, keyword: str, value: Any, path: tuple[str, ...], depth: int) -> Any:
        """_NOTHING: with this value the keyword has no effect."""
        if keyword in _MAPS:
            _check(isinstance(value, dict), path, "must be an object of schemas")
            return self._map(keyword, value, path, depth)
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            _check(isinstance(value, list), path, "must be an array of schemas")
            return [self.schema(one, (*path, f"[{i}]"), depth + 1) for i, one in enumerate(value)]
        if keyword in _SINGLE:
            return self.schema(value, path, depth + 1)
        if keyword == "$ref":
            return self._reference(value, path)
        return self._plain(keyword, value, path)

    def _map(self, keyword: str, value: dict[str, Any], path: tuple[str, ...], depth: int) -> Any:
        if keyword in ("properties", "patternProperties"):
            self._properties += len(value)
            _check(
                self._properties <= MAX_PROPERTIES,
                path,
                f"has too many properties; the limit of the schema is {MAX_PROPERTIES}",
            )
        read: dict[str, Any] = {}
        for name, one in value.items():
            here = (*path, name)
            if keyword == "patternProperties":
                _pattern(name, here)
            if keyword in ("$defs", "definitions") and not isinstance(one, dict | bool):
                self._ignore(name)
            elif keyword == "dependencies" and isinstance(one, list):
                read[name] = one
            else:
                read[name] = self.schema(one, here, depth + 1)
        return read

    def _plain(self, keyword: str, value: Any, path: tuple[str, ...]) -> Any:
        """A keyword whose value contains no schema."""
        if keyword == "enum":
            _check(isinstance(value, list) and bool(value), path, "must be an array with at least one value")
            self._enum_values += len(value)
            _check(
                self._enum_values <= MAX_ENUM_VALUES,
                path,
                f"has too many values; the limit of the schema is {MAX_ENUM_VALUES}",
            )
        elif keyword in _COUNTS:
            number = _is_number(value) and value >= 0
            _check(number and value == int(value), path, "must be a non-negative integer")
            is_most = keyword.startswith("max")  # a lower one allows less; no answer reaches it
            _check(is_most or value <= MAX_COUNT, path, f"is {value}; the limit is {MAX_COUNT}")
            return min(int(value), MAX_COUNT)
        elif keyword in _BOUNDS:
            older = keyword.startswith("exclusive") and isinstance(value, bool)  # in draft 4
            _check(older or _is_number(value), path, "must be a number")
        elif keyword == "required":
            named = isinstance(value, list) and all(isinstance(one, str) for one in value)
            _check(value is None or isinstance(value, bool) or named, path, "must be an array of names")
            return _NOTHING if value is None else value
        elif keyword == "pattern":
            return _pattern(value, path)
        elif keyword == "format":
            return self._format(value, path)
        elif keyword == "type":
            return self._type(value, path)
        elif keyword == "$schema":
            known = isinstance(value, str) and value.removesuffix("#") in DRAFTS
            if known and len(path) == 1:
                self.draft = value.removesuffix("#")
            elif not known:
                self.ignored["$schema"] = None
            return _NOTHING
        elif keyword in ("uniqueItems", "nullable", "x-ridgeline-unbounded"):
            _check(isinstance(value, bool), path, "must be true or false")
            return value or _NOTHING
        return value

    def _format(self, value: Any, path: tuple[str, ...]) -> Any:
        """An unknown format is an annotation, as JSON Schema says."""
        _check(isinstance(value, str), path, "must be a string")
        if value in LIBRARY_FORMATS or value in CHECKED_FORMATS or value in INTEGER_FORMATS:
            return value
        self._ignore(f"format {value}")
        return _NOTHING

    def _type(self, value: Any, path: tuple[str, ...]) -> Any:
        each = value if isinstance(value, list) else [value]
        if "any" in each:  # in draft 3: anything
            return _NOTHING
        for one in each:
            _check(isinstance(one, str) and one in TYPES, path, _unknown("type", one, TYPES))
        return value

    def _check_id(self, value: Any, schema: dict[str, Any], path: tuple[str, ...]) -> None:
        """An id is dropped if no $ref uses it and none within its schema is relative to it."""
        if len(path) == 1 or not isinstance(value, str) or value.startswith("#/"):
            return
        within = _References()
        if not value.startswith("#"):
            within.collect(schema)
        named = value in self._references.targets
        message = "identifies a nested schema, which is not supported if a $ref depends on it"
        _check(not named and not within.targets, path, message)

    def _reference(self, value: Any, path: tuple[str, ...]) -> str:
        _check(isinstance(value, str), path, "must be a string")
        target: str = value
        for own in self._own_ids:
            if target.startswith(f"{own}#"):
                target = target.removeprefix(own)
        _check(
            target.startswith("#"),
            path,
            f"refers to another document ({value[:100]!r}), which is not supported",
        )
        return target

    def _standard(self, read: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """Write draft 3's `required: true`, OpenAPI's `nullable` and integer formats in current keywords."""
        properties = read.get("properties")
        if isinstance(properties, dict):
            named = [name for name, one in properties.items() if isinstance(one, dict) and _is_required(one)]
            if named:
                already = read.get("required")
                listed = already if isinstance(already, list) else []
                read["required"] = [*listed, *(name for name in named if name not in listed)]
            for one in properties.values():
                if isinstance(one, dict):
                    _drop_boolean(one)
        if len(path) < 2 or path[-2] != "properties":
            _drop_boolean(read)  # not in a property: no effect
        if read.get("format") in INTEGER_FORMATS:
            _as_integer(read)
        if read.pop("nullable", False):
            return _nullable(read)
        return read


def _drop_boolean(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("required"), bool):
        del schema["required"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_required(schema: dict[str, Any]) -> bool:
    return schema.get("required") is True


def _as_integer(read: dict[str, Any]) -> None:
    bits = int(read.pop("format").removeprefix("int"))
    if read.get("type") == "integer":
        read.setdefault("minimum", -(2 ** (bits - 1)))
        read.setdefault("maximum", 2 ** (bits - 1) - 1)


def _nullable(read: dict[str, Any]) -> dict[str, Any]:
    types = read.get("type")
    if types is not None and not {"enum", "const", "$ref"} & read.keys():
        each = types if isinstance(types, list) else [types]
        return {**read, "type": [*each, *(["null"] if "null" not in each else [])]}
    kept: dict[str, Any] = {name: read.pop(name) for name in ("$defs", "definitions") if name in read}
    return {"anyOf": [read, {"type": "null"}], **kept}


def _own_ids(root: Any) -> tuple[str, ...]:
    if not isinstance(root, dict):
        return ()
    ids = (root.get("$id"), root.get("id"))
    return tuple(one.removesuffix("#") for one in ids if isinstance(one, str) and one.removesuffix("#"))


def _pattern(value: Any, path: tuple[str, ...]) -> str:
    _check(isinstance(value, str), path, "must be a regular expression")
    _check(len(value.encode()) <= MAX_PATTERN_BYTES, path, f"is longer than {MAX_PATTERN_BYTES} bytes")
    _check("\0" not in value, path, "contains a null character")
    text: str = value
    return text


def _unknown(what: str, value: Any, known: frozenset[str]) -> str:
    return f"the {what} {str(value)[:100]!r} is not supported; supported are {', '.join(sorted(known))}"


def _check(ok: bool, path: tuple[str, ...], message: str) -> None:
    if not ok:
        raise InvalidRequest(".".join(path).replace(".[", "[")[:500], message)


_EMBEDDED = re.compile(r"%json\s*(?=[\[{])")


def refuse_embedded(lark: str) -> None:
    """Check the schemas that a Lark grammar embeds with %json: each must be enforced in full."""
    decoder = json.JSONDecoder()
    for count, found in enumerate(_EMBEDDED.finditer(lark)):
        _check(count < MAX_EMBEDDED, (), f"the grammar embeds more than {MAX_EMBEDDED} schemas")
        try:
            schema, _ = decoder.raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue  # the library reports the error
        enforced_schema(schema, strict=True)


def _refuse_unenforced(checked: dict[str, str]) -> None:
    """Nothing is checked after the answer; overlapping branches of a oneOf are rejected by the library."""
    for word, place in checked.items():
        if word != "oneOf":
            message = f"the keyword {word!r} is not supported here: it can only be checked after the answer"
            raise InvalidRequest(place, message)
