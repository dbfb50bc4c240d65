# pyright reads this stub instead of the package: reading the package takes a fifth of its time.
from typing import Any

def __getattr__(name: str) -> Any: ...
