"""Check that llguidance can enforce a JSON schema. Errors name the path of the invalid part."""

import difflib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from typing import Any

from jpaged.errors import ErrorKind, RequestError, RequestTypeError, short_repr
from jpaged.structured_outputs import bounds
from jpaged.structured_outputs.property_counts import PropertyCount
from jpaged.structured_outputs.syntax import check_characters, check_pattern

ANNOTATION_KEYWORDS = {
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly"),
    *("writeOnly", "discriminator", "contentEncoding", "contentMediaType"),
    *("$comment", "$schema", "$id", "$anchor"),
}
"""Keywords of JSON Schema that do not restrict which values match."""

SCHEMA_KEYWORDS = {"items", "additionalProperties"}
SCHEMA_LIST_KEYWORDS = {"anyOf", "oneOf", "allOf", "prefixItems"}
SCHEMA_MAP_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions"}
_COUNT_KEYWORDS = {
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
}
_NUMBER_KEYWORDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_ENFORCED_KEYWORDS = {
    *("type", "enum", "const", "pattern", "format", "required", "multipleOf", "$ref"),
    *(
        SCHEMA_KEYWORDS
        | SCHEMA_LIST_KEYWORDS
        | SCHEMA_MAP_KEYWORDS
        | _COUNT_KEYWORDS
        | _NUMBER_KEYWORDS
    ),
}
_TYPE_NAMES = ("string", "number", "integer", "boolean", "null", "object", "array")
_FORMAT_NAMES = (
    *("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
)

SchemaPath = str
Schema = Mapping[str, Any]
_SchemasById = Mapping[int, tuple[SchemaPath, Schema]]
"""Maps `id(schema)` to the path and the schema."""
_ResolveReference = Callable[[SchemaPath, Schema], Any]
"""Function that returns the target of a schema's `$ref`."""


def check_schema(name: str, schema: object) -> None:
    """Check that a grammar can enforce a JSON schema, and that a value can match the schema.

    Args:
        name: Path of the schema, for errors.
        schema: The schema, as Python values.

    Raises:
        TypeError, ValueError: The schema is invalid or cannot be enforced. The error names the path
            of the invalid part.
    """
    if isinstance(schema, bool) or not isinstance(schema, Mapping):
        raise RequestTypeError(name, "must be a JSON schema (an object)", value=short_repr(schema))
    _SchemaChecker(schema, name).run()


def is_enforced(keyword: str, value: Any) -> bool:
    """Return whether a grammar can enforce a keyword with this value. Size limits are not
    checked."""
    if keyword == "format":
        return value in _FORMAT_NAMES
    if keyword == "multipleOf":
        return _is_number(value) and value == int(value)
    return keyword in _ENFORCED_KEYWORDS and not (
        keyword in _NUMBER_KEYWORDS and isinstance(value, bool)
    )


class _SchemaChecker:
    """Checks a root schema, and raises an error for the first part that cannot be enforced."""

    def __init__(self, root: Schema, name: str):
        self._root, self._name = root, name
        # Maps `id(schema)` to the path and the schema. The ids stay unique because the dict keeps
        # the schemas alive.
        self._schemas: dict[int, tuple[SchemaPath, Schema]] = {}
        # Targets of references. A key is `id(schema)` of a schema with a `$ref`. The value is the
        # schema to which the `$ref` refers.
        self._targets: dict[int, Any] = {}
        self._num_visits = 0

    def run(self) -> None:
        """Check every schema within the root and every target of a reference.

        Raises:
            TypeError, ValueError: A schema is malformed or cannot be enforced.
        """
        self._walk(self._name, self._root)
        left = deque(self._schemas.values())
        while left:
            path, schema = left.popleft()
            if "$ref" in schema:
                target = self._resolve(path, schema)
                if isinstance(target, Mapping) and id(target) not in self._schemas:
                    known = len(self._schemas)
                    self._walk(self._name + schema["$ref"][1:].replace("/", "."), target)
                    left.extend(list(self._schemas.values())[known:])
        _check_merged(self._schemas, self._resolve)
        _SatisfiabilityCheck(self._schemas, self._resolve).check()

    def _walk(self, name: SchemaPath, root: Schema) -> None:
        left: list[tuple[SchemaPath, Any, int]] = [(name, root, 0)]
        while left:
            path, schema, depth = left.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, Mapping):
                raise RequestTypeError(
                    path, "must be a schema: an object or a boolean", value=short_repr(schema)
                )
            bounds.SCHEMA_DEPTH.check(path, depth)
            self._num_visits += 1
            bounds.SCHEMAS.check(self._name, self._num_visits)
            self._schemas[id(schema)] = path, schema
            for keyword, value in schema.items():
                own = f"{path}.{keyword}"
                if keyword not in _ENFORCED_KEYWORDS:
                    _check_annotation(own, keyword, value, is_root=schema is self._root)
                    continue
                self._check_keyword(own, keyword, value, schema)
                left += [(where, it, depth + 1) for where, it in _subschemas(own, keyword, value)]
            if "minProperties" in schema or "maxProperties" in schema:
                _check_property_count(path, schema)

    def _check_keyword(self, path: SchemaPath, keyword: str, value: Any, schema: Schema) -> None:
        if keyword in _COUNT_KEYWORDS:
            _require(path, value, _is_count(value), "a count from 0 to 2**31 - 1")
        elif keyword in _NUMBER_KEYWORDS:
            _check_number(path, value)
        elif keyword == "multipleOf":
            _check_multiple(path, value)
        elif keyword == "type":
            named = value if isinstance(value, list) else [value]
            _require(
                path,
                value,
                bool(named) and all(it in _TYPE_NAMES for it in named),
                "a type such as 'string', or a list of types",
            )
        elif keyword in ("enum", "const"):
            _check_values(path, keyword, value)
        elif keyword == "required":
            is_names = isinstance(value, list) and all(isinstance(it, str) for it in value)
            _require(path, value, is_names, "a list of names (strings)")
            for name in value:
                check_characters(path, name)
        elif keyword == "pattern":
            _require(path, value, isinstance(value, str), "a regular expression")
            check_pattern(path, value)
        elif keyword == "format":
            known = f"one of {', '.join(_FORMAT_NAMES)}: omit other formats, which are not enforced"
            _require(path, value, value in _FORMAT_NAMES, known)
        elif keyword == "properties":
            _check_properties(path, value, schema)
        elif keyword in SCHEMA_MAP_KEYWORDS:
            _check_names(path, value)
            if keyword == "patternProperties":
                bounds.PATTERN_PROPERTIES.check(path, len(value))
                for name in value:
                    check_pattern(f"{path}.{name[:60]}", name)

    def _resolve(self, path: SchemaPath, schema: Schema) -> Any:
        """Return the target of the `$ref` of the schema at `path`."""
        if id(schema) not in self._targets:
            self._targets[id(schema)] = self._resolve_uncached(path, schema)
        return self._targets[id(schema)]

    def _resolve_uncached(self, path: SchemaPath, schema: Schema) -> Any:
        path, value = f"{path}.$ref", schema["$ref"]
        is_own = isinstance(value, str) and re.fullmatch(r"#(/[^%]*)?", value) is not None
        _require(path, value, is_own, "a reference within this schema, such as #/$defs/name")
        try:
            found = resolve_reference(self._root, value)
        except KeyError as error:
            words = f"cannot be resolved: {error.args[0]!r} does not exist"
            raise RequestError(path, words, value=short_repr(value)) from None
        _require(path, value, isinstance(found, (Mapping, bool)), "a reference to a schema")
        return found


def resolve_reference(root: Any, reference: str) -> Any:
    """Return the part of `root` that a reference such as "#/$defs/name" points to.

    Raises:
        KeyError: `root` lacks a name of the reference. `args[0]` of the error is the missing name.
    """
    found = root
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        step = unescape_pointer(step)
        if not isinstance(found, Mapping) or step not in found:
            raise KeyError(step)
        found = found[step]
    return found


def unescape_pointer(step: str) -> str:
    """Return a step of a JSON pointer without its escapes (RFC 6901)."""
    return step.replace("~1", "/").replace("~0", "~")


def _subschemas(path: SchemaPath, keyword: str, value: Any) -> Iterator[tuple[SchemaPath, Any]]:
    """Yield the path and value of each schema directly within a keyword's value."""
    if keyword in SCHEMA_KEYWORDS:
        yield path, value
    elif keyword in SCHEMA_LIST_KEYWORDS:
        _require(path, value, isinstance(value, list) and bool(value), "a list of schemas")
        bounds.SUBSCHEMAS_PER_KEYWORD.check(path, len(value))
        yield from ((f"{path}[{i}]", it) for i, it in enumerate(value))
    elif keyword in SCHEMA_MAP_KEYWORDS:
        for name, it in value.items():
            yield f"{path}.{name[:60]}", it


# The following functions check the values of keywords.


def _check_annotation(path: SchemaPath, keyword: object, value: Any, *, is_root: bool) -> None:
    """Check that a keyword does not restrict values, so that a grammar can ignore the keyword.

    Raises:
        ValueError: `keyword` is not a string, or may restrict values, or is "$id" below the root.
    """
    _require(path, keyword, isinstance(keyword, str), "a schema whose keywords are strings")
    keyword = str(keyword)
    if keyword == "$id" and not is_root:
        raise RequestError(path, "is allowed only at the root of the schema: remove it")
    asks_nothing = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True}
    if asks_nothing.get(keyword, ...) is value:
        return
    if keyword in ANNOTATION_KEYWORDS or (keyword.startswith("x-") and keyword != "x-guidance"):
        return
    near = difflib.get_close_matches(keyword[:60], sorted(_ENFORCED_KEYWORDS), 1, cutoff=0.8)
    hint = f"; did you mean {near[0]!r}?" if near else ": remove it, and check the answer yourself"
    problem = f"is not enforced by a grammar{hint}"
    raise RequestError(path[:200], problem, kind=ErrorKind.UNSUPPORTED)


def _check_number(path: SchemaPath, value: Any) -> None:
    is_exact = _is_number(value) and abs(value) <= bounds.MAX_NUMBER
    _require(
        path,
        value,
        is_exact,
        "a number of at most 2**53 in magnitude: larger numbers would be rounded",
    )


def _check_multiple(path: SchemaPath, value: Any) -> None:
    is_whole = _is_number(value) and 0 < value < float("inf") and value == int(value)
    _require(path, value, is_whole, "a whole number above 0: fractions are not enforced")
    if value > bounds.MAX_MULTIPLE_OF:
        raise RequestError(
            path, f"must be at most {bounds.MAX_MULTIPLE_OF}", value=short_repr(value)
        )


def _check_values(path: SchemaPath, keyword: str, value: Any) -> None:
    """Check that an answer can contain the values of an `enum` or a `const`, even nested values.

    Raises:
        ValueError: The list has too many values, a value is nested too deeply, or a string or a
            number cannot be enforced.
    """
    is_list = isinstance(value, list) and bool(value)
    _require(path, value, keyword == "const" or is_list, "a list of values, at least one")
    left, num_values = [(value, 0)], 0
    while left:
        it, depth = left.pop()
        num_values += 1
        bounds.ENUM_VALUES.check(path, num_values - (keyword == "enum"))
        bounds.SCHEMA_DEPTH.check(path, depth)
        if isinstance(it, str):
            check_characters(path, it)
        elif _is_number(it):
            _check_number(path, it)
        elif isinstance(it, Mapping):
            for name in it:
                check_characters(path, str(name))
            left += [(each, depth + 1) for each in it.values()]
        elif isinstance(it, (list, tuple)):
            left += [(each, depth + 1) for each in it]


def _check_properties(path: SchemaPath, value: Any, schema: Schema) -> None:
    _check_names(path, value)
    for name in value:
        check_characters(path, name)
    required = schema.get("required", ())
    needed = set(required) if isinstance(required, list) else set()
    bounds.OPTIONAL_PROPERTIES.check(path, sum(name not in needed for name in value))


def _check_property_count(path: SchemaPath, schema: Schema) -> None:
    """Raise ValueError if `minProperties` or `maxProperties` of a schema cannot be enforced."""
    count = PropertyCount.from_schema(schema)
    reason = (
        "cannot be enforced: a name that is not in properties may appear twice and would count "
        "twice"
    )
    if count.allows_other_names and count.min_optional > 1:
        raise RequestError(
            f"{path}.minProperties",
            f"{reason}. Drop minProperties, or list every name in properties and allow no other "
            "names: set additionalProperties to false and drop patternProperties",
            value=f"{schema['minProperties']}",
            kind=ErrorKind.UNSUPPORTED,
        )
    if "patternProperties" in schema and count.max_optional is not None and count.max_optional > 1:
        raise RequestError(
            f"{path}.maxProperties",
            f"{reason}. Drop maxProperties, or list the names in properties instead of "
            "patternProperties",
            value=f"{schema['maxProperties']}",
            kind=ErrorKind.UNSUPPORTED,
        )
    if count.needs_cases:
        keyword = "minProperties" if count.min_optional else "maxProperties"
        if not count.num_cases:
            raise RequestError(
                f"{path}.{keyword}",
                ": no object with these properties can match; change minProperties, maxProperties "
                "or properties",
                value=f"{schema[keyword]}",
            )
        bounds.PROPERTY_SETS.check(f"{path}.{keyword}", count.num_cases)


def _check_names(path: SchemaPath, value: Any) -> None:
    _require(path, value, isinstance(value, Mapping), "an object of schemas")
    for name in value:
        _require(path, name, isinstance(name, str), "an object whose names are strings")


def _require(path: SchemaPath, value: Any, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise RequestError(path, f"must be {expected}", value=short_repr(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# The following functions check sets of schemas that all apply to the same value.


def _check_merged(found: _SchemasById, resolve: _ResolveReference) -> None:
    """Raise ValueError if too many schemas, patterns or `multipleOf` apply to one JSON value.

    llguidance merges the schemas of `allOf`, `$ref`, `anyOf` and `oneOf` that apply to a value.
    """
    all_of = {key: list(_all_of(*each, resolve)) for key, each in found.items()}
    any_of = {
        key: [list(_cases(each[1], word)) for word in _CASE_KEYWORDS] for key, each in found.items()
    }
    within = {key: {*map(id, sum(any_of[key], all_of[key]))} & found.keys() for key in found}
    try:
        order = list(TopologicalSorter(within).static_order())
    except CycleError as error:
        path, _ = found[error.args[1][0]]
        raise RequestError(
            path,
            "refers to itself without a property or an item in between",
            remedy="change its $ref",
        ) from None
    tallies: dict[int, tuple[int, ...]] = {}
    counts: dict[int, frozenset[_ExtraNames]] = {}
    for key in order:
        path, schema = found[key]
        parts = [_schema_tally(schema), *(tallies.get(id(it), _ZERO_TALLY) for it in all_of[key])]
        for cases in any_of[key]:
            own = [tallies.get(id(it), _ZERO_TALLY) for it in cases]
            parts.append(tuple(map(max, zip(_ZERO_TALLY, *own, strict=True))))
        tallies[key] = tuple(map(sum, zip(*parts, strict=True)))
        tallied = (bounds.SCHEMAS_PER_VALUE, bounds.PATTERNS_PER_VALUE, bounds.MULTIPLES_PER_VALUE)
        for bound, number in zip(tallied, tallies[key], strict=True):
            bound.check(path, number)
        together = [
            {_extra_names(schema)},
            *(counts.get(id(it), _UNLIMITED_NAMES) for it in all_of[key]),
        ]
        for cases in filter(None, any_of[key]):
            together.append(
                frozenset().union(*(counts.get(id(it), _UNLIMITED_NAMES) for it in cases))
            )
        counts[key] = reduce(_intersect_counts, together, _UNLIMITED_NAMES)
        if (True, _SEVERAL) in counts[key]:
            raise RequestError(
                path,
                (
                    "combines patternProperties with a maxProperties above 1. The maximum cannot "
                    "be enforced, because a name that is not in properties may appear twice and "
                    "would count twice"
                ),
                remedy="drop maxProperties, or list the names in properties instead of "
                "patternProperties",
            )


_CASE_KEYWORDS = ("anyOf", "oneOf")
_ZERO_TALLY = (0, 0, 0)
_COMBINING_KEYWORDS = {
    "$ref",
    "allOf",
    "$defs",
    "definitions",
    *_CASE_KEYWORDS,
    *ANNOTATION_KEYWORDS,
}


def _schema_tally(schema: Schema) -> tuple[int, ...]:
    num_patterns = ("pattern" in schema) + ("format" in schema)
    return int(not schema.keys() <= _COMBINING_KEYWORDS), num_patterns, int("multipleOf" in schema)


_ExtraNames = tuple[bool, int]
"""Whether a schema has `patternProperties`, and how many property names it allows that `properties`
does not list: `_AT_MOST_ONE`, `_SEVERAL` or `_UNLIMITED`."""

_AT_MOST_ONE, _SEVERAL, _UNLIMITED = range(3)
_UNLIMITED_NAMES = frozenset({(False, _UNLIMITED)})


def _extra_names(schema: Schema) -> _ExtraNames:
    count = PropertyCount.from_schema(schema)
    room = (
        _UNLIMITED
        if count.max_optional is None
        else _AT_MOST_ONE
        if count.max_optional < 2
        else _SEVERAL
    )
    return "patternProperties" in schema, room if count.allows_other_names else _AT_MOST_ONE


def _intersect_counts(
    first: Iterable[_ExtraNames], second: Iterable[_ExtraNames]
) -> frozenset[_ExtraNames]:
    """Return the limits on the number of extra names in an object that matches two schemas.

    Extra names are property names that `properties` does not list. A schema with `anyOf` or `oneOf`
    has one limit for each subschema. The result has one limit for each pair of subschemas.

    Args:
        first: Limits of the first schema.
        second: Limits of the second schema.
    """
    return frozenset((a or b, min(m, n)) for a, m in first for b, n in second)


def _all_of(path: SchemaPath, schema: Schema, resolve: _ResolveReference) -> Iterator[Any]:
    """Yield the schemas in `allOf` and `$ref` of a schema.

    A value that matches the schema must match all yielded schemas.
    """
    yield from schema.get("allOf", ())
    if "$ref" in schema:
        yield resolve(path, schema)


def _cases(schema: Schema, keyword: str) -> Iterator[Any]:
    yield from schema.get(keyword, ())


# The following code finds JSON schemas that match no JSON value of finite size.


DISJOINT_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
"""JSON types without common values: here, "number" excludes integers."""


class _SatisfiabilityCheck:
    """Finds JSON schemas that match no JSON value of finite size.

    For example, an object that must contain another object of the same schema would be infinite.

    For each schema, the check computes the JSON types of the matching values of finite size. Every
    set of types is empty at first. The check adds types until no set changes (the least fixed
    point).
    """

    def __init__(self, found: _SchemasById, resolve: _ResolveReference):
        self._schemas, self._resolve = found, resolve
        self._types: dict[int, frozenset[str]] = dict.fromkeys(found, frozenset())
        # `_needed[id(schema), "object"]` lists the schemas of the required properties of `schema`.
        # `_needed[id(schema), "array"]` lists the schemas of the required items. `_compute_types`
        # removes a schema from the list when a value of finite size is known to match that schema.
        self._needed = {
            (key, kind): list(needed(schema))
            for key, (_, schema) in found.items()
            for kind, needed in (("object", _needed_properties), ("array", _needed_items))
        }

    def check(self) -> None:
        """Raise ValueError if a schema matches no JSON value, or only values that are nested
        without end."""
        users: dict[int, set[int]] = {key: set() for key in self._schemas}
        for key, (path, schema) in self._schemas.items():
            for it in self._deciding_schemas(path, schema):
                if id(it) in users:
                    users[id(it)].add(key)
        left = dict.fromkeys(self._schemas)
        # Work in rounds. Each round computes the types of a schema at most once, even if the schema
        # depends on many schemas whose types changed in the previous round.
        while left:
            changed = set[int]()
            for key in left:
                types = self._compute_types(*self._schemas[key])
                if types != self._types[key]:
                    self._types[key] = types
                    changed |= users[key]
            left = dict.fromkeys(changed)
        for key, (path, _) in self._schemas.items():
            if not self._types[key]:
                raise RequestError(
                    path,
                    "matches no finite value (every value is invalid or nested without end)",
                    remedy="make a required property or item optional, or change its type",
                )

    def _deciding_schemas(self, path: SchemaPath, schema: Schema) -> Iterator[Any]:
        """Yield the schemas that determine the JSON types of the values that `schema` allows.

        These are the schemas in `allOf`, `$ref`, `anyOf` and `oneOf`, and the schemas of required
        properties and items: if no value matches a required property, no object matches `schema`.
        """
        yield from _all_of(path, schema, self._resolve)
        for word in _CASE_KEYWORDS:
            yield from _cases(schema, word)
        yield from _needed_properties(schema)
        yield from _needed_items(schema)

    def _compute_types(self, path: SchemaPath, schema: Schema) -> frozenset[str]:
        types = declared_types(schema)
        for it in _all_of(path, schema, self._resolve):
            types &= self._schema_types(it)
        for word in _CASE_KEYWORDS:
            if word in schema:
                types &= frozenset().union(*(self._schema_types(it) for it in _cases(schema, word)))
        for kind in ("object", "array"):
            needed = self._needed[id(schema), kind]
            # `needed` lists schemas of required properties (or items). A schema stays in the list
            # until a value of finite size is known that matches it. Until the list is empty, no
            # object (or array) of finite size is known to match `schema`. Removed schemas never
            # return to the list, because a schema never loses a known type.
            while needed and self._schema_types(needed[-1]):
                needed.pop()
            if needed:
                types -= {kind}
        return types

    def _schema_types(self, schema: Any) -> frozenset[str]:
        if isinstance(schema, bool):
            return DISJOINT_TYPES if schema else frozenset()
        return self._types[id(schema)]


def declared_types(schema: Schema) -> frozenset[str]:
    """Return the types that `type`, `const` and `enum` of a schema allow."""
    types, named = DISJOINT_TYPES, schema.get("type")
    if named is not None:
        types = frozenset([named] if isinstance(named, str) else named)
        types |= {"integer"} if "number" in types else set()
    if "const" in schema:
        types &= {json_type(schema["const"])}
    if "enum" in schema:
        types &= {json_type(it) for it in schema["enum"]}
    return types


def _needed_properties(schema: Schema) -> Iterator[Any]:
    properties = schema.get("properties", {})
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        yield properties.get(name, others)


def _needed_items(schema: Schema) -> Iterator[Any]:
    first, count = schema.get("prefixItems", ()), schema.get("minItems", 0)
    yield from first[:count]
    if count > len(first):
        yield schema.get("items", True)


def json_type(value: Any) -> str:
    """Return the JSON type of a Python value. A whole float such as 1.0 is an "integer"."""
    if isinstance(value, float) and value == int(value):
        return "integer"
    return {str: "string", bool: "boolean", int: "integer", float: "number"}.get(
        type(value),
        "null" if value is None else "object" if isinstance(value, Mapping) else "array",
    )
