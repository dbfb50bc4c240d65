"""Write `bench/published_schemas.json`: JSON schemas, changed so that grammars can enforce them.

    pip install check-jsonschema kubernetes-validate nbformat
    python -m tools.published_schemas

The schemas are from Kubernetes 1.31 and SchemaStore (both Apache 2.0), and Jupyter (BSD 3-Clause).
The SchemaStore schemas are those that check-jsonschema ships. The tool changes each schema:

- It removes annotations and keywords that grammars do not enforce.
- It adds bounds to strings, arrays, maps and integers that have none.
- Objects with properties allow no other properties.
- A schema that allows any value becomes a short string or an integer.
- `oneOf` becomes `anyOf` if its subschemas do not exclude each other.

`left_out` of an entry lists the removed keywords, other than annotations.
"""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jpaged import StructuredOutputs, Tokenizer
from jpaged.config import EMBEDDED_MODEL
from jpaged.structured_outputs.compiler import GrammarCompiler
from jpaged.structured_outputs.matcher import GrammarError
from jpaged.structured_outputs.schemas import ANNOTATION_KEYWORDS, is_enforced

_TOKENIZER = Tokenizer.from_folder(Path(EMBEDDED_MODEL))
_GRAMMARS = GrammarCompiler(_TOKENIZER, len(_TOKENIZER), frozenset({_TOKENIZER.eos_token_id or 0}))

FILE = Path(__file__).parent.parent / "bench" / "published_schemas.json"
LENGTH, LONG, ITEMS, NUMBER = 12, 64, 2, 1000
"""Bounds that the tool adds where a schema has none.

The bounds are: length of a string, length of a string with a pattern or format, number of items of
an array, and absolute value of an integer.
"""

INSTALL = "pip install check-jsonschema kubernetes-validate nbformat"

ENTRIES = 1
"""Maximum number of entries that the tool adds to unbounded maps.

With more entries, a generated map could contain the same name twice.
"""

KUBERNETES = [
    *("affinity-v1", "clusterrole-rbac-v1", "configmap-v1", "container-v1"),
    *("csidriver-storage-v1", "endpoints-v1", "envvar-v1", "event-v1", "ingress-networking-v1"),
    *("ingressspec-networking-v1", "horizontalpodautoscalerspec-autoscaling-v2"),
    *("ingressclass-networking-v1", "lease-coordination-v1", "limitrange-v1", "namespace-v1"),
    *("networkpolicyspec-networking-v1", "nodestatus-v1", "persistentvolumeclaimspec-v1"),
    *("poddisruptionbudget-policy-v1", "podspec-v1", "priorityclass-scheduling-v1", "probe-v1"),
    *("resourcequota-v1", "role-rbac-v1", "rolebinding-rbac-v1", "runtimeclass-node-v1"),
    *("secret-v1", "service-v1", "serviceaccount-v1", "servicespec-v1"),
    *("storageclass-storage-v1", "subjectaccessreview-authorization-v1"),
    *("tokenreview-authentication-v1", "volume-v1", "binding-v1", "componentstatus-v1"),
    *("clusterrolebinding-rbac-v1", "csinode-storage-v1", "volumeattachmentspec-storage-v1"),
    *("certificatesigningrequestspec-certificates-v1", "daemonsetstatus-apps-v1"),
]
STORE = [
    *("bamboo-spec", "buildkite", "changie", "cloudbuild", "codecov", "github-actions"),
    *("github-discussion", "github-issue-config"),
]


def main() -> None:
    """Convert all schemas and write the file."""
    entries = {name: _converted(*each) for name, each in _published()}
    FILE.write_text(json.dumps(entries, separators=(",", ":")) + "\n", encoding="utf-8")


def _published() -> Iterator[tuple[str, tuple[str, Any, Any]]]:
    """Yield (name, (source, schema, document)) for each published schema.

    `document` contains the definitions to which the schema refers.
    """
    folder = _folder("kubernetes_validate") / "kubernetes-json-schema" / "v1.31.0-local"
    definitions = _read(folder / "_definitions.json")
    for name in KUBERNETES:
        yield f"kubernetes/{name}", ("Kubernetes 1.31", _read(folder / f"{name}.json"), definitions)
    folder = _folder("check_jsonschema") / "builtin_schemas" / "vendor"
    for name in STORE:
        whole = _read(folder / f"{name}.json")
        yield f"store/{name}", ("SchemaStore", whole, whole)
    whole = _read(_folder("nbformat") / "v3" / "nbformat.v3.schema.json")
    yield "jupyter/nbformat.v3", ("Jupyter", whole, whole)


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: {INSTALL}")
    return Path(spec.origin).parent


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _converted(source: str, schema: Any, document: Any) -> dict[str, Any]:
    try:
        return _written(source, schema, _Converter(document, excluding=True))
    except GrammarError:
        return _written(source, schema, _Converter(document, excluding=False))


def _written(source: str, schema: Any, converter: "_Converter") -> dict[str, Any]:
    """Convert a schema, and return the entry for the output file.

    Raises:
        GrammarError: a grammar cannot enforce the schema.
    """
    own = converter.schema(schema)
    own = {**own, "$defs": converter.definitions} if converter.definitions else own
    _GRAMMARS.compile(StructuredOutputs(json=own))
    return {"source": source, "left_out": sorted(converter.left_out), "schema": own}


class _Converter:
    """Converter of published JSON schemas to schemas that a grammar can enforce.

    `definitions` collects the converted definitions to which the converted schemas refer.
    """

    def __init__(self, document: Any, *, excluding: bool):
        self._document, self._excluding = document, excluding
        self.definitions: dict[str, Any] = {}
        self.left_out: set[str] = set()

    def schema(self, schema: Any, *, is_part: bool = False) -> Any:
        """Return a schema that a grammar can enforce, with limits on lengths and numbers.

        Set `is_part` for a subschema in `anyOf`, `oneOf` or `allOf` whose parent schema has
        "properties". Only strings in the subschema then get a limit. A limit on objects could
        exclude properties of the parent.
        """
        if schema is True or schema == {}:
            return {"type": ["string", "integer"], **_bounds({"string", "integer"}, {})}
        if schema is False:
            return False
        if "$ref" in schema:
            return {"$ref": self._reference(schema["$ref"])}
        own: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in ANNOTATION_KEYWORDS or keyword.startswith("x-") or keyword in _MOVED:
                continue
            if not is_enforced(keyword, value):
                self.left_out.add(keyword if keyword != "format" else f"format {value}")
                continue
            if keyword == "oneOf" and not self._excluding:
                keyword = "anyOf"
                self.left_out.add("oneOf")
            own[keyword] = self._within(keyword, value, is_part="properties" in schema)
        if isinstance(own.get("items"), list):
            own["prefixItems"] = own.pop("items")
        named = own.get("type", [])
        types = {named} if isinstance(named, str) else set(named)
        if not types and not is_part and (kind := _kind_of(own)) is not None:
            types, own["type"] = {kind}, kind
        own |= _bounds(types & {"string"} if is_part else types, own)
        return own if own or is_part else self.schema({})

    def _within(self, keyword: str, value: Any, *, is_part: bool) -> Any:
        if isinstance(value, Mapping) and keyword == "patternProperties":
            named = value.items()
            return {it if len(value) > 1 else _NAME: self.schema(own) for it, own in named}
        if isinstance(value, Mapping) and keyword == "properties":
            return {name: self.schema(it) for name, it in value.items()}
        if keyword in ("anyOf", "oneOf", "allOf"):
            return [self.schema(it, is_part=is_part) for it in value]
        if keyword in ("items", "prefixItems") and isinstance(value, list):
            return [self.schema(it) for it in value]
        if keyword in ("items", "additionalProperties"):
            return self.schema(value) if value is not False else False
        return value

    def _reference(self, pointer: str) -> str:
        """Convert the definition unless it is already converted, and return a reference to it."""
        name = re.sub(r"\W", "_", pointer.rpartition("/")[2])
        if name not in self.definitions:
            # This entry ends the recursion if the definition refers to itself.
            self.definitions[name] = {}
            found = self._document
            for step in pointer.partition("#")[2].split("/")[1:]:
                found = found[step.replace("~1", "/").replace("~0", "~")]
            self.definitions[name] = self.schema(found)
        return f"#/$defs/{name}"


_ANYTHING = {"type": "string", "maxLength": LENGTH}

_NAME = f"^[A-Za-z0-9_.-]{{1,{LENGTH}}}$"
"""Regular expression that the names in a map must match."""

_MOVED = {"$defs", "definitions", "id", "$async"}


def _kind_of(own: Mapping[str, Any]) -> str | None:
    """Infer the type of a schema without "type" from the other keywords; return None if unknown."""
    if own.keys() & {"properties", "required", "additionalProperties", "patternProperties"}:
        return "object"
    return "string" if own.keys() & {"pattern", "format", "minLength", "maxLength"} else None


def _bounds(types: set[str], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords to add to a schema, so that values of the given types have bounds."""
    if "enum" in own or "const" in own:
        return {}
    found: dict[str, Any] = {}
    if "string" in types and "maxLength" not in own and not own.keys() >= {"format", "pattern"}:
        length = LONG if own.keys() & {"format", "pattern"} else LENGTH
        found["maxLength"] = max(length, own.get("minLength", 0))
    if "array" in types:
        found["maxItems"] = max(min(own.get("maxItems", ITEMS), ITEMS), own.get("minItems", 0))
        if "items" not in own:
            found["items"] = {"type": "string", "maxLength": LENGTH}
    if "integer" in types:
        found["minimum"] = own.get("minimum", -NUMBER)
        found["maximum"] = own.get("maximum", max(NUMBER, found["minimum"]))
    if "object" in types:
        if own.get("properties") and not own.keys() & {"allOf", "anyOf", "oneOf"}:
            needed = set(own.get("required", ())) - own["properties"].keys()
            found["additionalProperties"] = False
            found["properties"] = {**own["properties"], **dict.fromkeys(needed, _ANYTHING)}
        elif not own.get("properties") and own.get("additionalProperties", True) is not False:
            least = max(own.get("minProperties", 0), len(own.get("required", ())))
            found["maxProperties"] = ENTRIES + least
            if "patternProperties" not in own:
                others = own.get("additionalProperties", True)
                found["patternProperties"] = {_NAME: _ANYTHING if others is True else others}
            found["additionalProperties"] = False
    return found


if __name__ == "__main__":
    main()
