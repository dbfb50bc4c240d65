"""jpaged: PagedAttention serving for JAX on NVIDIA GPUs.

The names below load on first use, so that host-side parts (`jpaged.core`) and `--help` do not
pay for importing JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from jpaged.version import __version__

if TYPE_CHECKING:
    from jpaged.config import EngineConfig
    from jpaged.core.accounts import BlockInfo, BlockState, MemoryReport, SequenceInfo
    from jpaged.core.watch import PoolChanges, PoolWatch
    from jpaged.engine import Engine
    from jpaged.metrics import EngineStats, RequestMetrics
    from jpaged.outputs import CompletionOutput, Logprob, RequestDelta, RequestOutput, TextDelta
    from jpaged.sampling_params import SamplingParams
    from jpaged.tokenizer import Tokenizer

_HOME = {
    "BlockInfo": "jpaged.core.accounts",
    "BlockState": "jpaged.core.accounts",
    "CompletionOutput": "jpaged.outputs",
    "Engine": "jpaged.engine",
    "EngineConfig": "jpaged.config",
    "EngineStats": "jpaged.metrics",
    "Logprob": "jpaged.outputs",
    "MemoryReport": "jpaged.core.accounts",
    "PoolChanges": "jpaged.core.watch",
    "PoolWatch": "jpaged.core.watch",
    "RequestDelta": "jpaged.outputs",
    "RequestMetrics": "jpaged.metrics",
    "RequestOutput": "jpaged.outputs",
    "SamplingParams": "jpaged.sampling_params",
    "SequenceInfo": "jpaged.core.accounts",
    "TextDelta": "jpaged.outputs",
    "Tokenizer": "jpaged.tokenizer",
}

__all__ = [
    "BlockInfo",
    "BlockState",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "MemoryReport",
    "PoolChanges",
    "PoolWatch",
    "RequestDelta",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SequenceInfo",
    "TextDelta",
    "Tokenizer",
    "__version__",
    "options",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
