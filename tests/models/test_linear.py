"""Test that a weight format alone decides how a projection stores its weight."""

import ast
import math
import re
from dataclasses import replace
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
from jpaged.models.config import QuantizationConfig
from jpaged.models.formats import Projection, WeightFormat, zero_param
from jpaged.models.weight_plan import model_parameters
from jpaged.runtime.fused_layers import fused_layer_weights


def test_only_four_python_files_of_jpaged_use_the_attribute_weight():
    root = Path(jpaged.__file__).parent
    found = set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "weight":
                found.add(file.relative_to(root).as_posix())
    assert found == {"models/formats.py", "models/fp8.py", "models/linear.py", "models/norm.py"}


class Turned(WeightFormat):
    """A weight format that only this test defines. It stores the weight as `turned` [out, in], and
    multiplies it by `sign`."""

    name = "turned"

    def __init__(self, projection, dtype):
        super().__init__(projection, dtype)
        self.turned = zero_param(
            dtype, math.prod(projection.output_shape), math.prod(projection.input_shape)
        )
        self.sign = zero_param(dtype)

    @classmethod
    def rules(cls, projection, sources, target, *, transposed):
        size_in, width = math.prod(projection.input_shape), math.prod(projection.trailing_shape)
        file_axes = ((0,), (1,)) if transposed else ((1,), (0,))
        placed = [(it, a * width, n * width) for it, a, n in projection.source_ranges(sources)]
        return [
            WeightRule(source + ".weight", target + ".turned", (size, size_in), file_axes, 0, start)
            for source, start, size in placed
        ]

    def matmul_partials(self, x: Any, backend):
        return (x.reshape(len(x), -1) @ self.turned[...].T * self.sign[...])[None]

    def gated_silu(self, x, backend):
        gate_up = self.matmul(x, backend)
        return nnx.silu(gate_up[:, 0]) * gate_up[:, 1]


@pytest.mark.parametrize(
    "case",
    [
        "gpt2",
        "llama3-biases",
        *(pytest.param(case, marks=pytest.mark.full) for case in ("opt-350m", "llama", "gemma3")),
    ],
)
def test_model_can_use_a_new_weight_format(case):
    config = replace(config_of(case), quantization=QuantizationConfig(Turned))
    tensors = {name: tensor.numpy() for name, tensor in reference(case).state_dict().items()}
    other = build(config, tensors, jnp.float32, filled={"sign": 1.0})
    paths = model_parameters(other)
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
    assert fused_layer_weights(other.layers[0], other.layers[1]) is None


def test_separate_and_fused_tensors_load_the_same_weight():
    projection = Projection((6,), (("q", 4), ("k", 2), ("v", 2)), (8,), has_bias=True)
    assert projection.output_shape == (8, 8)
    assert projection.source_ranges(["q", "k", "v"]) == [("q", 0, 4), ("k", 4, 2), ("v", 6, 2)]
    assert projection.source_ranges(["qkv"]) == [("qkv", 0, 8)]
    with pytest.raises(ValueError, match="zip"):
        projection.source_ranges(["q", "kv"])
