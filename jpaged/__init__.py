"""jpaged: PagedAttention serving for JAX on NVIDIA GPUs.

The names below load on first use, so that host-side parts (`jpaged.core`) and `--help` do not
pay for importing JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jpaged.config import EngineConfig
    from jpaged.engine.engine import Engine
    from jpaged.observe.pool_changes import PoolChanges, PoolWatch
    from jpaged.observe.pool_report import BlockInfo, BlockState, MemoryReport, SequenceInfo
    from jpaged.observe.statistics import EngineStats, RequestMetrics
    from jpaged.outputs import CompletionOutput, Logprob, RequestDelta, RequestOutput, TextDelta
    from jpaged.sampling_params import SamplingParams
    from jpaged.text.tokenizer import Tokenizer

_NAMES = {
    "jpaged.config": ("EngineConfig",),
    "jpaged.engine.engine": ("Engine",),
    "jpaged.observe.pool_changes": ("PoolChanges", "PoolWatch"),
    "jpaged.observe.pool_report": ("BlockInfo", "BlockState", "MemoryReport", "SequenceInfo"),
    "jpaged.observe.statistics": ("EngineStats", "RequestMetrics"),
    "jpaged.outputs": ("CompletionOutput", "Logprob", "RequestDelta", "RequestOutput", "TextDelta"),
    "jpaged.sampling_params": ("SamplingParams",),
    "jpaged.text.tokenizer": ("Tokenizer",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

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
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
