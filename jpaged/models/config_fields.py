"""Typed access to the fields of a `config.json`, with errors that name field and value."""

import sys
from collections.abc import Mapping
from reprlib import Repr
from typing import Any

REQUIRED = object()

MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1024),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 2**14),
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 2**20),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 2**22),
    "vocab_size": 2**24,
}
"""The largest that a field can be: several times what any model has, and little enough that nothing
a field stands for takes much memory before it was compared with the checkpoint and the device."""

_MOST = 2**30
"""The largest of all others: positions and tokens, which are counted in 32 bits."""


_shown = Repr()
_shown.maxlong = _shown.maxstring = _shown.maxother = 100


def refuse(field: str, value: object, supported: object) -> ValueError:
    """The error for a field whose value is not supported."""
    shown = _shown.repr(value)  # whatever was in the file: deep, long
    return ValueError(f"model config: {field}={shown} is not supported; supported: {supported}")


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
        """An integer from 1 to the field's most."""
        value, most = self.get(name, default, alias=alias), MOST.get(name, _MOST)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise refuse(name, value, f"integers from 1 to {most}")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """An integer from 1, or None for null."""
        if self.get(name, default) is None:
            return None
        return self.integer(name, default)

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """A finite number above 0."""
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise refuse(name, value, "finite numbers above 0")
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
