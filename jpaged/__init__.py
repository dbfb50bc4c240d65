"""jpaged: PagedAttention serving for JAX on NVIDIA GPUs.

Public names are imported on first use, so that `--help` and host-side modules such as `jpaged.core`
do not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jpaged.config import EngineConfig
    from jpaged.engine.engine import Engine
    from jpaged.models.checkpoint import check_model
    from jpaged.models.jax_model import JaxModel
    from jpaged.models.model_ops import ModelOps
    from jpaged.models.model_step import ModelStep
    from jpaged.observe.pool_changes import PoolChanges, PoolWatch
    from jpaged.observe.pool_report import BlockInfo, BlockState, MemoryReport, SequenceInfo
    from jpaged.observe.statistics import EngineStats, RequestMetrics
    from jpaged.outputs import (
        CompletionOutput,
        CompletionScore,
        Logprob,
        RequestDelta,
        RequestOutput,
        TextDelta,
    )
    from jpaged.parsing.answer import AnswerParser
    from jpaged.parsing.reasoning import REASONING_FAMILIES, reasoning_end
    from jpaged.parsing.stream import CallArguments, CallEnd, CallStart, Content, Reasoning
    from jpaged.parsing.tool_families import TOOL_CALL_FAMILIES
    from jpaged.parsing.tool_grammar import call_grammar
    from jpaged.sampling_params import SamplingParams
    from jpaged.structured_outputs import StructuredOutputs
    from jpaged.structured_outputs.trial import GrammarTrial
    from jpaged.text.tokenizer import Tokenizer

_EXPORTS = {
    "jpaged.config": ("EngineConfig",),
    "jpaged.engine.engine": ("Engine",),
    "jpaged.models.checkpoint": ("check_model",),
    "jpaged.models.jax_model": ("JaxModel",),
    "jpaged.models.model_ops": ("ModelOps",),
    "jpaged.models.model_step": ("ModelStep",),
    "jpaged.observe.pool_changes": ("PoolChanges", "PoolWatch"),
    "jpaged.observe.pool_report": ("BlockInfo", "BlockState", "MemoryReport", "SequenceInfo"),
    "jpaged.observe.statistics": ("EngineStats", "RequestMetrics"),
    "jpaged.outputs": (
        "CompletionOutput",
        "CompletionScore",
        "Logprob",
        "RequestDelta",
        "RequestOutput",
        "TextDelta",
    ),
    "jpaged.sampling_params": ("SamplingParams",),
    "jpaged.structured_outputs": ("StructuredOutputs",),
    "jpaged.parsing.answer": ("AnswerParser",),
    "jpaged.structured_outputs.trial": ("GrammarTrial",),
    "jpaged.parsing.reasoning": ("REASONING_FAMILIES", "reasoning_end"),
    "jpaged.parsing.stream": (
        "CallArguments",
        "CallEnd",
        "CallStart",
        "Content",
        "Reasoning",
    ),
    "jpaged.text.tokenizer": ("Tokenizer",),
    "jpaged.parsing.tool_families": ("TOOL_CALL_FAMILIES",),
    "jpaged.parsing.tool_grammar": ("call_grammar",),
}
_EXPORT_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "REASONING_FAMILIES",
    "TOOL_CALL_FAMILIES",
    "AnswerParser",
    "BlockInfo",
    "BlockState",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "CompletionOutput",
    "CompletionScore",
    "Content",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "GrammarTrial",
    "JaxModel",
    "Logprob",
    "MemoryReport",
    "ModelOps",
    "ModelStep",
    "PoolChanges",
    "PoolWatch",
    "Reasoning",
    "RequestDelta",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SequenceInfo",
    "StructuredOutputs",
    "TextDelta",
    "Tokenizer",
    "__version__",
    "call_grammar",
    "check_model",
    "reasoning_end",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORT_MODULES:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    return getattr(import_module(_EXPORT_MODULES[name]), name)
