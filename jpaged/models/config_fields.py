"""Typed access to the fields of a `config.json`, with errors that name field and value."""

from collections.abc import Mapping
from typing import Any

REQUIRED = object()


def refuse(field: str, value: object, supported: object) -> ValueError:
    """The error for a field whose value is not supported."""
    return ValueError(f"model config: {field}={value!r} is not supported; supported: {supported}")


def refuse_head_size(value: int, supported: str) -> ValueError:
    """The same for a head size, which is a field of its own or follows from two others."""
    derived = "where it is missing it is hidden_size / num_attention_heads"
    return refuse("head_dim", value, f"{supported} ({derived})")


class Fields:
    """Typed access to a config; every complaint names its field and value."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def get(self, name: str, default: Any = None, *, alias: str = "") -> Any:
        """The value under `name` or `alias`; the default if it is missing, None if it is null."""
        for key in (name, alias):
            if key in self._values:
                return self._values[key]
        if default is REQUIRED:
            raise ValueError(f"model config: {name} is missing; add it to config.json")
        return default

    def integer(self, name: str, default: Any = REQUIRED, *, alias: str = "") -> int:
        """An integer from 1."""
        value = self.get(name, default, alias=alias)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise refuse(name, value, "integers from 1")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """An integer from 1, or None for null."""
        if self.get(name, default) is None:
            return None
        return self.integer(name, default)

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """A number above 0."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise refuse(name, value, "numbers above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; null means the default."""
        value = self.get(name, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise refuse(name, value, "true, false")
        return value

    def choice(self, name: str, default: Any, choices: tuple[str, ...]) -> str:
        """One of `choices`."""
        value = self.get(name, default)
        if value not in choices:
            raise refuse(name, value, ", ".join(choices))
        return value
