"""Rewrite JSON schemas so that llguidance enforces them as specified."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from jpaged.structured_outputs.property_counts import PropertyCount
from jpaged.structured_outputs.schemas import (
    DISJOINT_TYPES,
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    SCHEMA_MAP_KEYWORDS,
    declared_types,
    json_type,
    resolve_reference,
)

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_MINUTE})"
_FORMAT_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
"""Patterns that replace llguidance's formats, which allow second 60 and 29 February in any year."""

_MAX_FACTS_DEPTH = 100
"""Maximum nesting depth of schemas, including `$ref`, at which `_Facts` (bounds on the matching
values) are computed."""


def rewrite_schema(schema: Any) -> Any:
    """Return an equivalent schema that llguidance enforces.

    `schemas.check_schema` must have accepted `schema`.
    """
    return _SchemaRewriter(schema).rewrite(schema)


class _SchemaRewriter:
    def __init__(self, root: Any):
        self._root = root
        # The keys contain `id()` of schemas. The ids stay unique because the root keeps the schemas
        # alive.
        self._facts_by_id: dict[tuple[int, bool], _Facts] = {}
        self._depth = 0

    def rewrite(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        own = {keyword: self._rewrite_value(keyword, value) for keyword, value in schema.items()}
        more: list[Any] = []
        pattern = _FORMAT_PATTERNS.get(own.get("format", ""))
        if pattern is not None:
            del own["format"]
            more.append({"pattern": f"^{pattern}$"})
        if "oneOf" in own and self._are_exclusive(schema["oneOf"]):
            more.append({"anyOf": own.pop("oneOf")})
        count = PropertyCount.from_schema(schema)
        if count.needs_cases:
            own.pop("minProperties", None)
            own.pop("maxProperties", None)
            others = declared_types(schema) - {"object"}
            others -= {"integer"} if "number" in others else set()
            more.append({"anyOf": [*count.cases(schema), *({"type": it} for it in sorted(others))]})
        if more:
            own["allOf"] = [*own.get("allOf", ()), *more]
        return own

    def _rewrite_value(self, keyword: str, value: Any) -> Any:
        if keyword in SCHEMA_KEYWORDS:
            return self.rewrite(value)
        if keyword in SCHEMA_LIST_KEYWORDS:
            return [self.rewrite(it) for it in value]
        if keyword in SCHEMA_MAP_KEYWORDS:
            return {name: self.rewrite(it) for name, it in value.items()}
        return value

    def _are_exclusive(self, cases: list[Any]) -> bool:
        """Return whether no value can match two cases of a `oneOf`. Return False if unknown."""
        facts = [self._facts(case, with_properties=True) for case in cases]
        if _are_distinct([it.values for it in facts]):
            return True
        if all(it.types <= {"object"} for it in facts):
            for name in frozenset.intersection(*(it.required for it in facts)):
                found = [it.properties.get(name, _Facts(DISJOINT_TYPES)) for it in facts]
                if _are_distinct([it.values for it in found]):
                    return True
        return all(one.excludes(other) for one, other in combinations(facts, 2))

    def _facts(self, schema: Any, *, with_properties: bool = False) -> "_Facts":
        """Return bounds on the values that match a schema.

        Args:
            schema: A schema within the root schema.
            with_properties: Whether to compute bounds on the values of an object's properties too.
        """
        if not isinstance(schema, Mapping):
            return _Facts(DISJOINT_TYPES if schema else frozenset())
        key = id(schema), with_properties
        if key not in self._facts_by_id:
            if self._depth == _MAX_FACTS_DEPTH:
                return _Facts(DISJOINT_TYPES)  # deep schema: assume that any JSON value may match
            self._depth += 1
            self._facts_by_id[key] = self._find_facts(schema, with_properties=with_properties)
            self._depth -= 1
        return self._facts_by_id[key]

    def _find_facts(self, schema: Mapping[str, Any], *, with_properties: bool) -> "_Facts":
        found = self._own_facts(schema, with_properties=with_properties)
        for part in schema.get("allOf", ()):
            found = found.intersect(self._facts(part, with_properties=with_properties))
        if "$ref" in schema:
            target = resolve_reference(self._root, schema["$ref"])
            found = found.intersect(self._facts(target, with_properties=with_properties))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                found = found.intersect(_unite_facts([self._facts(it) for it in schema[word]]))
        return found

    def _own_facts(self, schema: Mapping[str, Any], *, with_properties: bool) -> "_Facts":
        values = None
        if "enum" in schema:
            values = frozenset(map(_value_key, schema["enum"]))
        if "const" in schema:
            values = _intersect_sets(values, frozenset([_value_key(schema["const"])]))
        named = schema.get("properties", {})
        is_closed = schema.get("additionalProperties") is False
        return _Facts(
            declared_types(schema),
            values,
            {name: self._facts(it) for name, it in named.items() if with_properties},
            frozenset(schema.get("required", ())),
            frozenset(named) if is_closed and "patternProperties" not in schema else None,
        )


@dataclass(frozen=True)
class _Facts:
    """An upper bound on the set of values that match a schema.

    Attributes:
        types: JSON types that a matching value may have.
        values: Results of `_value_key` for all values that may match; None if every value of
            `types` may match.
        properties: Bounds on the values of an object's properties, by name.
        required: Names of the properties that an object must have.
        names: Names of the properties that an object may have; None for any name.
    """

    types: frozenset[str]
    values: frozenset[Any] | None = None
    properties: Mapping[str, "_Facts"] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    names: frozenset[str] | None = None

    def intersect(self, other: "_Facts") -> "_Facts":
        """Return bounds on the values that match the schemas of both `self` and `other`."""
        properties = dict(self.properties)
        for name, facts in other.properties.items():
            properties[name] = properties[name].intersect(facts) if name in properties else facts
        return _Facts(
            self.types & other.types,
            _intersect_sets(self.values, other.values),
            properties,
            self.required | other.required,
            _intersect_sets(self.names, other.names),
        )

    def excludes(self, other: "_Facts") -> bool:
        """Return True only if no value matches the schemas of both `self` and `other`."""
        common = self.types & other.types
        if not common or (
            self.values is not None
            and other.values is not None
            and self.values.isdisjoint(other.values)
        ):
            return True
        return common == {"object"} and any(
            name in one.properties and one.properties[name].excludes(two.properties[name])
            if name in two.properties
            else two.names is not None and name not in two.names
            for one, two in ((self, other), (other, self))
            for name in one.required
        )


def _are_distinct(values: Sequence[frozenset[Any] | None]) -> bool:
    """Return whether sets of JSON values are disjoint; False if a set is unknown (None)."""
    known = [each for each in values if each is not None]
    num_values = sum(map(len, known))
    return len(known) == len(values) and len(frozenset().union(*known)) == num_values


def _unite_facts(cases: list[_Facts]) -> _Facts:
    values: frozenset[Any] | None = frozenset()
    for case in cases:
        values = None if values is None or case.values is None else values | case.values
    return _Facts(frozenset().union(*(case.types for case in cases)), values)


def _intersect_sets(
    one: frozenset[Any] | None, two: frozenset[Any] | None
) -> frozenset[Any] | None:
    return one if two is None else two if one is None else one & two


def _value_key(value: Any) -> Any:
    """Return a hashable key of a JSON value. Two values have equal keys if and only if the values
    are equal in JSON: 1 equals 1.0, but 1 does not equal true."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, _value_key(it)) for name, it in value.items())
    if isinstance(value, (list, tuple)):
        return "array", tuple(map(_value_key, value))
    return json_type(value), value
