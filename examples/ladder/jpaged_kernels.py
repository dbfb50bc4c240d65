"""The top of the ladder: the same workload through jpaged's own kernel of ragged prefill.

`paged_prefill_attention` is rung 5 made fast: larger tiles, several query heads sharing one read of
a key head (GQA), masks only where the diagonal needs them, several tiles of keys in flight. Its
numbers are counted as rung 5's, with the tile that its program has: read from the program itself.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from examples.ladder import rung_4_block_tables
from examples.ladder.workload import HEAD_SIZE, Cost, Workload, tiled_cost
from pallas_kernels import Backend, LayerKV, paged_prefill_attention, select_backend


def rungs() -> tuple[SimpleNamespace, ...]:
    """jpaged's kernel as rungs: for this device, and on a CPU also interpreted as for a GPU."""
    backend = select_backend(jax.default_backend())
    others = () if backend is Backend.TRITON else (Backend.INTERPRET,)
    return tuple(rung_of(each) for each in (backend, *others))


def rung_of(backend: Backend) -> SimpleNamespace:
    """The kernel on one back end."""

    @jax.jit
    def attend(q, k_pool, v_pool, block_tables, query_start_loc, seq_lens):
        kv, scale = LayerKV(k_pool, v_pool), HEAD_SIZE**-0.5
        arrays = (q, kv, block_tables, query_start_loc, seq_lens)
        return paged_prefill_attention(*arrays, scale=scale, backend=backend)

    def cost(work: Workload) -> Cost:
        return tiled_cost(work, *tile_of(attend, prepare(work)))

    title = f"jpaged's kernel, {backend}"
    return SimpleNamespace(TITLE=title, prepare=prepare, attend=attend, cost=cost)


def prepare(work: Workload):
    """Flat queries, the pool, block tables [B, M], the sequences' first rows [B + 1], lengths."""
    _, k_pool, v_pool, tables, *_ = rung_4_block_tables.prepare(work)
    query_start_loc = np.cumsum([0, *work.lengths], dtype=np.int32)
    seq_lens = np.array(work.lengths, np.int32)
    return work.q, k_pool, v_pool, tables.astype(np.int32), query_start_loc, seq_lens


def tile_of(function, arguments) -> tuple[int, int]:
    """Queries and keys of a tile: the sides of the weights that a traced kernel multiplies by the
    values, which is the last GEMM in it."""
    *_, last = products(jax.make_jaxpr(function)(*arguments).jaxpr)
    return last[-2], last[-1]


def products(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The left shape of each GEMM of a program, in order; loops and calls looked into."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.invars[0].aval.shape
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from products(inner)


if __name__ == "__main__":
    from examples.ladder import rung_5_ragged
    from examples.ladder.workload import main

    main(rung_5_ragged, *rungs())
