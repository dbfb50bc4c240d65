"""Tool-call families: one file for each way in which models write tool calls, named as in vLLM.

A family's file describes the format and defines two classes:

    Parser   a `ToolCallParser`, which finds the calls in an answer
    Grammar  a `CallGrammar`, whose rules the parser can read back

A new file in this folder is a new family: the server's flag and its errors list it.
"""

import pkgutil
from importlib import import_module
from types import ModuleType

from jpaged.errors import RequestError

TOOL_CALL_FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""The names of the families."""


def load_family(name: str) -> ModuleType:
    """Return the module of a family, which defines `Parser` and `Grammar`."""
    if name not in TOOL_CALL_FAMILIES:
        problem = f"must be one of {', '.join(TOOL_CALL_FAMILIES)}"
        raise RequestError("family", problem, value=repr(name))
    return import_module(f"{__name__}.{name}")
