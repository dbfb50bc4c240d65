"""Programs that share what is lowered once compute what those with their own do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jpaged.runtime import shared_calls
from jpaged.runtime.shared_calls import SharedCalls
from pallas_kernels import Backend, truncation_mask

B, V = 4, 1000
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


@pytest.mark.parametrize("backend", [Backend.XLA, Backend.INTERPRET])
def test_it_keeps_the_same_tokens(backend: Backend):
    shared, given = SharedCalls().truncation_mask, arguments()
    expected = truncation_mask(**given, backend=backend)
    kept = jax.jit(lambda it: ~shared(**it, backend=backend))(given)
    np.testing.assert_array_equal(~kept, expected)
    assert 0 < expected.sum() < expected.size


def test_it_is_lowered_once_for_a_shape(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def counted(logits, **rows):
        seen.append(logits.shape)
        return truncation_mask(logits, **rows)

    monkeypatch.setattr(shared_calls, "truncation_mask", counted)
    shared = SharedCalls().truncation_mask
    for batch in (B, 2, B):
        jax.jit(lambda it: shared(**it, backend=Backend.XLA).sum())(arguments(batch))
    assert seen == [(B, V), (2, V)]


def test_it_launches_the_same_kernels_on_a_gpu():
    def lowered(truncate) -> str:
        shapes = jax.tree.map(lambda it: jax.ShapeDtypeStruct(it.shape, it.dtype), arguments())
        run = partial(truncate, backend=Backend.TRITON)
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
            traced = jax.jit(lambda it: run(**it)).trace(shapes)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    own = lowered(truncation_mask)
    assert lowered(SharedCalls().truncation_mask).count(KERNEL) == own.count(KERNEL) > 0
