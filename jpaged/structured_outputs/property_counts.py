"""`minProperties` and `maxProperties` of a schema, written as cases that llguidance enforces."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class PropertyCount:
    """The number of properties that one schema allows an object, next to the required ones.

    Attributes:
        optional: Names in `properties` that may be left out.
        least: Minimum number of properties that are not required.
        most: Maximum number of these; None for any number.
        is_open: Whether an object may have names that `properties` does not list.
    """

    optional: tuple[str, ...]
    least: int
    most: int | None
    is_open: bool

    @classmethod
    def of(cls, schema: Schema) -> "PropertyCount":
        """Return the count of a schema whose keywords were checked."""
        required, most = set(schema.get("required", ())), schema.get("maxProperties")
        named = schema.get("properties", {}).items()
        is_open = schema.get("additionalProperties", True) is not False
        return cls(
            tuple(name for name, own in named if name not in required and own is not False),
            max(schema.get("minProperties", 0) - len(required), 0),
            None if most is None else most - len(required),
            is_open or "patternProperties" in schema,
        )

    @property
    def needs_cases(self) -> bool:
        """Whether llguidance refuses the schema unless its cases are written out."""
        if not self.optional or (self.least == 0 and self.most is None):
            return False
        return self.is_open or self.least > 1 or self.most not in (None, 1)

    @property
    def num_cases(self) -> int:
        """Number of schemas that `cases` yields; 0 if no object obeys."""
        num = len(self.optional)
        if self._is_bounded:
            return sum(math.comb(num, size) for size in self._sizes)
        return math.comb(num, self.least) + self.is_open

    def cases(self, schema: Schema) -> Iterator[dict[str, Any]]:
        """Yield schemas that together allow the right numbers of properties.

        An object with a right number of properties matches exactly one of them.

        Args:
            schema: As for `of`. An object must also match it, without the two keywords.
        """
        counts = {key: schema[key] for key in ("minProperties", "maxProperties") if key in schema}
        if self._is_bounded:  # the optional properties that an object has
            for size in self._sizes:
                for names in combinations(self.optional, size):
                    yield self._case(names, self.optional) | (counts if self.is_open else {})
            return
        for names in combinations(self.optional, self.least):  # the first ones that it has
            end = self.optional.index(names[-1]) if names else 0
            yield self._case(names, self.optional[:end])
        if self.is_open:
            yield self._case((), self.optional) | counts

    @property
    def _is_bounded(self) -> bool:
        """Whether the maximum allows fewer properties than there are."""
        return self.most is not None and (self.is_open or self.most < len(self.optional))

    @property
    def _sizes(self) -> range:
        """Numbers of optional properties that an object may have."""
        most = min(len(self.optional), len(self.optional) if self.most is None else self.most)
        return range(0 if self.is_open else self.least, most + 1)

    @staticmethod
    def _case(names: tuple[str, ...], others: tuple[str, ...]) -> dict[str, Any]:
        """Return a schema that requires `names`, and forbids `others` that are not among them."""
        forbidden = {name: False for name in others if name not in names}
        return {"type": "object", "required": list(names), "properties": forbidden}
