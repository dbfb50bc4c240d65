"""Build Hypothesis strategies from the published JSON schemas, for valid and arbitrary values."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)
"""Arbitrary JSON values."""

# maximum length of generated arrays and texts; other tests check the larger limits of the schema
_LONGEST = 12


def values_of(schema: Schema, whole: Schema) -> st.SearchStrategy[Any]:
    """Return a strategy for values that the schema accepts.

    Args:
        schema: A schema with types, bounds, enumerations, arrays and objects.
        whole: The whole JSON document, in which `$ref` references are looked up.
    """
    if "$ref" in schema:
        target: Any = whole
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return values_of(target, whole)
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) if schema["enum"] else st.nothing()
    if "anyOf" in schema:
        return st.one_of([values_of(each, whole) for each in schema["anyOf"]])
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of([values_of({**schema, "type": each}, whole) for each in kind])
    makers = {
        None: lambda *_: ANYTHING,
        "null": lambda *_: st.none(),
        "boolean": lambda *_: st.booleans(),
        "integer": _integers,
        "number": _numbers,
        "string": _texts,
        "array": _arrays,
        "object": _objects,
    }
    return makers[kind](schema, whole)


def _integers(schema: Schema, _: Schema) -> st.SearchStrategy[int]:
    low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63)
    near = st.integers(max(low, -4), min(high, 300)) if low <= 300 and high >= -4 else st.nothing()
    return near | st.integers(low, high)


def _numbers(schema: Schema, _: Schema) -> st.SearchStrategy[float]:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -1e9))
    return st.floats(low, schema.get("maximum", 1e9), exclude_min="exclusiveMinimum" in schema)


def _texts(schema: Schema, _: Schema) -> st.SearchStrategy[str]:
    least = schema.get("minLength", 0)
    return st.text(st.characters(codec="utf-8"), min_size=least, max_size=max(_LONGEST, least))


def _arrays(schema: Schema, whole: Schema) -> st.SearchStrategy[list[Any]]:
    least, most = schema.get("minItems", 0), min(schema.get("maxItems", _LONGEST), _LONGEST)
    return st.lists(values_of(schema.get("items", {}), whole), min_size=least, max_size=most)


def _objects(schema: Schema, whole: Schema) -> st.SearchStrategy[dict[str, Any]]:
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    fields = {name: values_of(each, whole) for name, each in properties.items()}
    if schema.get("additionalProperties") and not properties:
        pattern = schema.get("propertyNames", {}).get("pattern")
        names = st.from_regex(pattern, fullmatch=True) if pattern else st.text(max_size=10)
        return st.dictionaries(names, values_of(schema["additionalProperties"], whole), max_size=4)
    needed = {name: fields[name] for name in required}
    # Use at most four optional fields per request body: the server refuses nearly every body with
    # all fields.
    others = st.lists(st.sampled_from(sorted(set(fields) - set(required))), max_size=4, unique=True)
    if len(needed) == len(fields):
        return st.fixed_dictionaries(needed)
    return others.flatmap(
        lambda names: st.fixed_dictionaries(needed | {name: fields[name] for name in names})
    )
