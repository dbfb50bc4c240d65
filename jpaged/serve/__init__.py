"""The HTTP server for OpenAI's and Anthropic's APIs: `python -m jpaged.serve`.

`serve(engine)` serves an engine of this process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.serve.http.attached import serve

__all__ = ["serve"]


def __getattr__(name: str) -> object:
    """Import `serve` at its first use, so that the command line starts fast."""
    if name != "serve":
        raise AttributeError(f"module 'jpaged.serve' has no attribute {name!r}")
    from jpaged.serve.http.attached import serve

    return serve
