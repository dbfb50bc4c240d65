"""Every program a running engine can need, compiled before it serves.

Programs are compiled ahead of time and called as compiled executables, so that nothing can compile
while serving: a shape that was not foreseen is an error, not a pause.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from jpaged.runtime.buckets import Buckets
from jpaged.runtime.program_store import ProgramStore, never_cached
from jpaged.runtime.recipes import (
    Name,
    Recipe,
    Shapes,
    SplitModel,
    prefill_recipe,
    recipes,
    sample_recipe,
)
from jpaged.runtime.sampler import SamplerLevel
from jpaged.runtime_config import RuntimeConfig


@dataclass(frozen=True)
class Programs:
    """Compiled programs, by shape where there are several; `jpaged.runtime.steps` says what each
    does."""

    decode: dict[int, Any]
    prefill: dict[tuple[int, int], Any]
    sample: dict[tuple[int, SamplerLevel], Any]
    prompt_logprobs: dict[int, Any]
    load_row: Any
    copy_blocks: Any
    fork_rows: Any
    gather_blocks: dict[int, Any]
    scatter_blocks: dict[int, Any]

    @staticmethod
    def of(compiled: dict[Name, Any]) -> "Programs":
        """Sort compiled programs by kind."""

        def kind(name: str) -> dict:
            return {key: program for (own, key), program in compiled.items() if own == name}

        return Programs(
            decode=kind("decode"),
            prefill=kind("prefill"),
            sample=kind("sample"),
            prompt_logprobs=kind("prompt_logprobs"),
            load_row=compiled["load_row", None],
            copy_blocks=compiled["copy_blocks", None],
            fork_rows=compiled["fork_rows", None],
            gather_blocks=kind("gather_blocks"),
            scatter_blocks=kind("scatter_blocks"),
        )


def compile_programs(
    split: SplitModel,
    shapes: Shapes,
    config: RuntimeConfig,
    buckets: Buckets,
    *,
    threads: int,
    store: ProgramStore | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Programs:
    """Compile everything, `threads` programs at a time.

    Args:
        split: The model.
        shapes: Shapes of the device's arrays.
        config: The runtime's numbers.
        buckets: The steps' shapes.
        threads: Compilations at once; XLA compiles outside Python's lock.
        store: Where earlier engines left what they traced and lowered.
        progress: Called with (compiled so far, all).
    """
    wanted = list(recipes(split, shapes, config, buckets))
    done: dict[Name, Any] = {}
    with ThreadPoolExecutor(threads) as pool:
        programs = pool.map(partial(_compile, store=store), wanted)
        for recipe, program in zip(wanted, programs, strict=True):
            done[recipe.name] = program
            progress(len(done), len(wanted))
    if store is not None:
        store.prune()
    return Programs.of(done)


def _compile(recipe: Recipe, store: ProgramStore | None) -> Any:
    """With a store, what was exported is compiled in every start, the first one too: only so is it
    the same to JAX's own cache."""
    if store is None:
        return recipe.compile()
    exported = store.load(recipe.key)
    if exported is None:
        exported = recipe.exported()
        store.save(recipe.key, exported)
    return recipe.compile(exported)


def largest_step_workspace(
    split: SplitModel,
    shapes: Shapes,
    config: RuntimeConfig,
    buckets: Buckets,
    store: ProgramStore | None = None,
) -> int:
    """Bytes of temporaries and fresh outputs of the largest step, as compiled.

    The pool's size does not enter them, so any `num_blocks` in `shapes` gives the same answer.
    """
    prefill = prefill_recipe(split, shapes, config, *max(buckets.prefill_shapes()))
    sampling = sample_recipe(shapes, config, max(buckets.decode_seqs), max(SamplerLevel))

    def compute() -> int:
        return sum(_workspace(recipe.compile()) for recipe in (prefill, sampling))

    if store is None:
        return compute()
    with never_cached():
        return store.number(f"workspace of {prefill.key} and {sampling.key}", compute)


def _workspace(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    fresh_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + fresh_outputs
