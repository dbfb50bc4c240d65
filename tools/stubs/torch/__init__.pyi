# pyright reads this stub instead of the package. Reading transformers and torch takes a fifth of
# its time.
from typing import Any

def __getattr__(name: str) -> Any: ...
