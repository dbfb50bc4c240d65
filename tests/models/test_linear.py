"""A projection owns its weight and its format: nothing else knows how the weight is stored."""

import ast
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from harness import Harness, PagedSequence
from hf_models import build, config_of, reference

import jpaged
from jpaged.models.checkpoint import WeightRule
from jpaged.models.config import Projection
from jpaged.models.formats import Plain, pieces, sizes, zeros
from jpaged.models.linear import FORMATS
from jpaged.runtime.fused_layers import weights_between

OWNERS = {"models/formats.py", "models/fp8.py", "models/linear.py", "models/norm.py"}
"""The formats of projections; tables; norms, whose weights are their own."""


def test_nothing_else_reads_a_weight():
    root = Path(jpaged.__file__).parent
    found = set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "weight":
                found.add(file.relative_to(root).as_posix())
    assert found == OWNERS


class Turned(Plain):
    """A format for this test: weights [out, in] with the sign turned, under another name."""

    def parameters(self, projection, dtype):
        size_in, size_out = (int(np.prod(it)) for it in (projection.inputs, projection.outputs))
        return {"turned": zeros(dtype, size_out, size_in), "sign": zeros(dtype)}

    def rules(self, projection, sources, target, *, transposed):
        size_in, width = int(np.prod(projection.inputs)), int(np.prod(projection.width))
        placed = [
            (source, start * width, size * width)
            for source, start, size in pieces(projection, sources)
        ]
        file_axes = ((0,), (1,)) if transposed else ((1,), (0,))
        return [
            WeightRule(source + ".weight", target + ".turned", (size, size_in), file_axes, 0, start)
            for source, start, size in placed
        ]

    def layout(self, projection):
        return {"turned": (0, sizes(projection))}

    @property
    def row_scales(self):
        return None

    def given_scales(self, linear):
        return None

    def product(self, linear: Any, x, backend):
        rows = x @ linear.turned[...].T * linear.sign[...]
        return rows.reshape(len(x), *linear.projection.outputs)

    def partials(self, linear, x, backend):
        return self.product(linear, x, backend).reshape(1, len(x), -1)

    def gated_silu(self, linear, x, backend):
        gate_up = self.product(linear, x, backend)
        return nnx.silu(gate_up[:, 0]) * gate_up[:, 1]

    def array(self, linear):
        return None


@pytest.mark.parametrize(
    "case",
    [
        "gpt2",
        "llama3-biases",
        *(pytest.param(case, marks=pytest.mark.full) for case in ("opt-350m", "llama", "gemma3")),
    ],
)
def test_a_format_is_all_that_knows_how_a_weight_is_stored(case, monkeypatch):
    """Loaded into another format, a model gives the logits of transformers all the same."""
    monkeypatch.setitem(FORMATS, "plain", Turned())
    tensors = {name: tensor.numpy() for name, tensor in reference(case).state_dict().items()}
    other = build(config_of(case), tensors, jnp.float32, filled={"sign": 1.0})
    monkeypatch.undo()
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(other))]
    projections = r"(attention\.(qkv|output)|mlp\.\w+|project_\w+)\.(weight|turned)"
    kept = [match[0] for path in paths if (match := re.search(projections, path))]
    assert kept
    assert all(path.endswith("turned") for path in kept)
    tokens = np.random.RandomState(0).randint(2, 97, 12).tolist()
    harness, sequence = Harness(other), PagedSequence(tokens)
    got = np.concatenate([harness.step([(sequence, n)])[0] for n in (10, 1, 1)])
    with torch.no_grad():
        expected = reference(case)(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert weights_between(other.layers[0], other.layers[1]) is None


def test_parts_that_lie_apart_or_fused_fill_the_same_places():
    projection = Projection((6,), (("q", 4), ("k", 2), ("v", 2)), (8,), bias=True)
    assert projection.outputs == (8, 8)
    assert pieces(projection, ["q", "k", "v"]) == [("q", 0, 4), ("k", 4, 2), ("v", 6, 2)]
    assert pieces(projection, ["qkv"]) == [("qkv", 0, 8)]
    with pytest.raises(ValueError, match="zip"):
        pieces(projection, ["q", "kv"])
