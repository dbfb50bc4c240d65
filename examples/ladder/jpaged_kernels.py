"""The top of the ladder: the same workload with jpaged's ragged prefill kernel.

`paged_prefill_attention` is a fast version of rung 5. The tiles are larger, and several query heads
share one read of a key head (GQA). Only tiles on the diagonal are masked. The next tiles of keys
are loaded during the computation. The cost is computed as in rung 5, with the kernel's tile size.
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
    """Return versions of attention that run jpaged's kernel, in the form that `main` expects.

    The first version uses the backend for this device. Unless this backend is Triton, a second
    version runs the Triton kernel in the interpreter.
    """
    backend = select_backend(jax.default_backend())
    others = () if backend is Backend.TRITON else (Backend.INTERPRET,)
    return tuple(rung_of(each) for each in (backend, *others))


def rung_of(backend: Backend) -> SimpleNamespace:
    """Return a version of attention (rung) that runs `paged_prefill_attention` with `backend`."""

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
    """Return the arguments of the kernel.

    They are queries [T, N, H], the pools, block tables [B, M], the first row of each sequence
    [B + 1], and the lengths [B].
    """
    _, k_pool, v_pool, tables, *_ = rung_4_block_tables.prepare(work)
    query_start_loc = np.cumsum([0, *work.lengths], dtype=np.int32)
    seq_lens = np.array(work.lengths, np.int32)
    return work.q, k_pool, v_pool, tables.astype(np.int32), query_start_loc, seq_lens


def tile_of(function, arguments) -> tuple[int, int]:
    """Trace the kernel `function`; return the number of queries and the number of keys of a tile.

    The last GEMM of the kernel multiplies the softmax weights [queries, keys] by the values. The
    shape of these weights gives both numbers.
    """
    *_, last = products(jax.make_jaxpr(function)(*arguments).jaxpr)
    return last[-2], last[-1]


def products(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shape of the left operand of each GEMM in program order.

    GEMMs inside loops and inside called functions count too.
    """
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
