"""Tool-call families: the formats in which models write tool calls.

Each family has one file, named as vLLM names the family's parser. The file defines two classes:

    Parser   a `ToolCallParser` that finds the calls in an answer
    Grammar  a `CallGrammar` that generates calls which the parser can read

To add a family, add a file to this folder. The server's flag and its errors then list the family.
"""

import pkgutil
from importlib import import_module
from types import ModuleType

from jpaged.errors import RequestError

TOOL_CALL_FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""Names of the tool-call families."""


def load_family(name: str) -> ModuleType:
    """Return the module of a tool-call family, which defines `Parser` and `Grammar`.

    Raises:
        ValueError: No family has this name.
    """
    if name not in TOOL_CALL_FAMILIES:
        problem = f"must be one of {', '.join(TOOL_CALL_FAMILIES)}"
        raise RequestError("family", problem, value=repr(name))
    return import_module(f"{__name__}.{name}")
