"""Test `SharedCalls`, which lowers a function once for several programs."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jpaged.compile.recipes import SharedCalls
from pallas_kernels import Backend, truncation_mask

B, V = 4, 200
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
KERNEL = "stablehlo.custom_call @__gpu$xla.gpu.triton"


def arguments(batch: int = B) -> dict[str, jax.Array]:
    logits = np.random.RandomState(0).normal(size=(batch, V)) * 3
    return {
        "logits": jnp.asarray(logits, jnp.float32),
        "temperature": jnp.linspace(0.5, 2, batch, dtype=jnp.float32),
        "min_p": jnp.full(batch, 0.01, jnp.float32),
        "top_k": jnp.arange(batch, dtype=jnp.int32) * 7,
        "top_p": jnp.full(batch, 0.9, jnp.float32),
    }


@pytest.mark.parametrize(
    "backend", [Backend.XLA, pytest.param(Backend.INTERPRET, marks=pytest.mark.full)]
)
def test_function_shared_by_programs_returns_the_result_of_a_direct_call(backend: Backend):
    shared, given = SharedCalls(backend), arguments()
    keep = partial(truncation_mask, backend=backend)
    expected = truncation_mask(**given, backend=backend)
    kept = jax.jit(lambda it: ~shared(keep, **it))(given)
    np.testing.assert_array_equal(~kept, expected)
    assert 0 < expected.sum() < expected.size


def test_function_shared_by_programs_is_traced_once_per_shape_dtype_and_keyword_value():
    seen, shared = [], SharedCalls(Backend.XLA)

    def scale(x, y, *, by):
        seen.append((x.shape, y.dtype.name, by))
        return x * y.astype(x.dtype) * by

    def run(batch: int, dtype: str, by: int) -> None:
        x, y = jnp.ones(batch, jnp.float32), jnp.full(batch, 3, dtype)
        got = jax.jit(lambda x, y: shared(partial(scale, by=by), x, y=y))(x, y)
        np.testing.assert_array_equal(got, jnp.full(batch, 3 * by, jnp.float32))

    for _ in range(2):
        run(4, "int32", 2)
        run(2, "int32", 2)
        run(4, "int8", 2)
        run(4, "int32", 5)
    assert seen == [((4,), "int32", 2), ((2,), "int32", 2), ((4,), "int8", 2), ((4,), "int32", 5)]


def test_sharing_a_lowered_function_between_programs_adds_no_kernels():
    def lowered(call: Callable) -> str:
        shapes = jax.tree.map(lambda it: jax.ShapeDtypeStruct(it.shape, it.dtype), arguments())
        run = partial(call, partial(truncation_mask, backend=Backend.TRITON))
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
            traced = jax.jit(lambda it: run(**it)).trace(shapes)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    own = lowered(lambda keep, **given: keep(**given))
    assert lowered(SharedCalls(Backend.TRITON)).count(KERNEL) == own.count(KERNEL) > 0
