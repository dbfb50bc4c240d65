"""Rewrite `minProperties` and `maxProperties` of a schema as cases that llguidance enforces."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class PropertyCount:
    """Limits that a JSON schema sets on the number of an object's optional properties.

    Attributes:
        optional_names: Names in `properties` that are neither required nor forbidden.
        min_optional: Minimum number of properties that are not required.
        max_optional: Maximum number of properties that are not required; None for no maximum.
        allows_other_names: Whether an object may have names that `properties` does not list.
    """

    optional_names: tuple[str, ...]
    min_optional: int
    max_optional: int | None
    allows_other_names: bool

    @classmethod
    def from_schema(cls, schema: Schema) -> "PropertyCount":
        """Return the limits that a JSON schema sets on the number of an object's optional
        properties."""
        required, max_optional = set(schema.get("required", ())), schema.get("maxProperties")
        named = schema.get("properties", {}).items()
        allows_other_names = schema.get("additionalProperties", True) is not False
        return cls(
            tuple(name for name, own in named if name not in required and own is not False),
            max(schema.get("minProperties", 0) - len(required), 0),
            None if max_optional is None else max_optional - len(required),
            allows_other_names or "patternProperties" in schema,
        )

    @property
    def needs_cases(self) -> bool:
        """Whether llguidance refuses the schema's `minProperties` and `maxProperties`.

        If so, the schemas from `cases` must replace these keywords.
        """
        if not self.optional_names or (self.min_optional == 0 and self.max_optional is None):
            return False
        return (
            self.allows_other_names or self.min_optional > 1 or self.max_optional not in (None, 1)
        )

    @property
    def num_cases(self) -> int:
        """Number of schemas that `cases` yields; 0 if no object can match."""
        num = len(self.optional_names)
        if self._is_bounded:
            return sum(math.comb(num, size) for size in self._sizes)
        return math.comb(num, self.min_optional) + self.allows_other_names

    def cases(self, schema: Schema) -> Iterator[dict[str, Any]]:
        """Yield schemas that replace `minProperties` and `maxProperties` of `schema`.

        An object with an allowed number of properties matches exactly one of the schemas. The
        yielded schemas do not contain the other keywords of `schema`.

        Args:
            schema: The schema that was passed to `from_schema`.
        """
        counts = {key: schema[key] for key in ("minProperties", "maxProperties") if key in schema}
        if self._is_bounded:  # yield one case for each allowed set of optional properties
            for size in self._sizes:
                for names in combinations(self.optional_names, size):
                    yield self._case(names, self.optional_names) | (
                        counts if self.allows_other_names else {}
                    )
            return
        # Choose `min_optional` of the optional names in every possible way. For each choice, yield
        # a schema that requires the chosen names. For example, the optional names a, b and c with
        # `min_optional` = 2 give three schemas. The first requires a and b. The second requires a
        # and c, and forbids b. The third requires b and c, and forbids a. The rule is that a schema
        # forbids the other optional names before its last required name. Without this rule, an
        # object with a, b and c would match all three schemas.
        for names in combinations(self.optional_names, self.min_optional):
            end = self.optional_names.index(names[-1]) if names else 0
            yield self._case(names, self.optional_names[:end])
        if self.allows_other_names:
            yield self._case((), self.optional_names) | counts

    @property
    def _is_bounded(self) -> bool:
        """Whether the schema's other keywords allow objects that `maxProperties` forbids.

        False if an object can have at most `max_optional` optional properties anyway.
        """
        return self.max_optional is not None and (
            self.allows_other_names or self.max_optional < len(self.optional_names)
        )

    @property
    def _sizes(self) -> range:
        """How many of the names in `optional_names` an object may have."""
        max_optional = min(
            len(self.optional_names),
            len(self.optional_names) if self.max_optional is None else self.max_optional,
        )
        return range(0 if self.allows_other_names else self.min_optional, max_optional + 1)

    @staticmethod
    def _case(names: tuple[str, ...], others: tuple[str, ...]) -> dict[str, Any]:
        """Return a schema that requires every name in `names`, and forbids every name in `others`
        that is not in `names`."""
        forbidden = {name: False for name in others if name not in names}
        return {"type": "object", "required": list(names), "properties": forbidden}
