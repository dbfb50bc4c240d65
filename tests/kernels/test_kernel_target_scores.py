"""Test the scores of given tokens against the reference, on every implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F16, F32, XLA_AND_TRITON, lower

from pallas_kernels import Backend, target_scores
from pallas_kernels.target_scores import xla
from tests.reference import kernels as reference

# Vocabulary sizes. The XLA code handles slices of 256 tokens: 5 tokens are less than one slice, and
# 769 tokens are three slices and one more token. The Hopper kernel needs multiples of 8, so the
# kernel runs only with 256, 384, 520 and 648 tokens. For these sizes, the last tile of the kernel
# has 256, 128, 8 and 136 tokens.
WIDTHS = (5, 256, 300, 384, 520, 648, 769)


def run(dtype, rows, width, *, depth=128, soft_cap=None, backend):
    """Return the op's scores of random rows, and the scores that the reference computes.

    Some targets are the first or last token of the vocabulary or of a slice. Other targets are
    outside the vocabulary.
    """
    rng = np.random.default_rng(width + rows)
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    table = jnp.asarray(rng.standard_normal((width, depth)) * depth**-0.5, dtype)
    targets = rng.integers(0, width, rows, np.int32)
    edges = [0, width - 1, -1, width, width // 256 * 256, width // 256 * 256 - 1]
    targets[: len(edges)] = edges[:rows]
    op = jax.jit(partial(target_scores, soft_cap=soft_cap, backend=backend))
    found = op(x, table, jnp.asarray(targets))
    exact = reference.target_scores(
        np.asarray(x, np.float64), np.asarray(table, np.float64), targets, soft_cap
    )
    return found, exact


@pytest.mark.parametrize("backend", XLA_AND_TRITON)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "rows"), [(F32, 7), (BF16, 1), (BF16, 130), (F16, 256)])
def test_target_scores_match_reference(monkeypatch, dtype, rows, width, backend):
    monkeypatch.setattr(xla, "SLICE_TOKENS", 256)
    found, expected = run(dtype, rows, width, backend=backend)
    for name, ours, exact in zip(found._fields, found, expected, strict=True):
        assert (ours.shape, ours.dtype) == ((rows,), F32)
        np.testing.assert_allclose(ours, exact, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("backend", XLA_AND_TRITON)
def test_soft_cap_bounds_the_logits(backend):
    found, expected = run(F32, 9, 300, soft_cap=0.5, backend=backend)
    assert float(found.largest.max()) < 0.5
    for ours, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "kernel"),
    [
        ((1024, 1024, 151936), BF16, True),
        ((64, 4096, 128256), F16, True),
        ((64, 64, 512), F32, False),
        ((64, 768, 50257), BF16, False),
    ],
)
def test_target_scores_lower_to_one_hopper_kernel(shape, dtype, kernel):
    """With the kernel, the program has no matrix product, so it stores no logits."""
    rows, depth, width = shape
    sizes = ((rows, depth), dtype), ((width, depth), dtype), ((rows,), jnp.int32)
    arguments = [jax.ShapeDtypeStruct(*each) for each in sizes]
    text = lower(partial(target_scores, backend=Backend.TRITON), *arguments)
    assert ("target_scores_hopper" in text, "dot_general" in text) == (kernel, not kernel)
