"""How a checkpoint's tensors become a model's parameters: the rules a family gives the loader."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jpaged.models.config import ModelConfig


def identity(tensor: np.ndarray) -> np.ndarray:
    """The transform of a tensor whose layout is already ours."""
    return tensor


@dataclass(frozen=True)
class WeightRule:
    """Where one kind of checkpoint tensor goes.

    A parameter's path is the dotted path of its `nnx.Param` in the model, such as
    `layers.0.attention.qkv.weight`. Several rules may fill one (fused) parameter, a piece each.

    Attributes:
        pattern: regular expression that must match the whole of a checkpoint tensor's name.
        target: path of the parameter, with references to the pattern's groups
            (`r"layers.\\1.attention.qkv.weight"`). None: the tensor is known and not needed, such
            as a causal-mask buffer or the copy of a tied output head.
        transform: checkpoint layout to the layout of the piece. Works on any numpy array,
            ml_dtypes' bfloat16 included; must return a view (it may only order and split axes).
        axis: the axis of the fused parameter along which this piece lies; None: the piece is the
            whole parameter.
        start: index along `axis` at which the piece begins.
    """

    pattern: str
    target: str | None
    transform: Callable[[np.ndarray], np.ndarray] = identity
    axis: int | None = None
    start: int = 0


def transposed(tensor: np.ndarray) -> np.ndarray:
    """A checkpoint's linear weight [out, in] as [in, out]."""
    return tensor.T


def by_heads(num_heads: int, head_size: int, axis: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """A transform that splits `axis` [heads * H] into [heads, H]; ValueError if it does not fit."""

    def transform(tensor: np.ndarray) -> np.ndarray:
        before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
        return tensor.reshape(*before, num_heads, head_size, *after)

    return transform


def input_heads(num_heads: int, head_size: int) -> Callable[[np.ndarray], np.ndarray]:
    """A linear weight [D, heads * H] that takes heads, as [heads, H, D]."""
    split = by_heads(num_heads, head_size, axis=1)
    return lambda tensor: split(tensor).transpose(1, 2, 0)


def output_heads(num_heads: int, head_size: int) -> Callable[[np.ndarray], np.ndarray]:
    """A linear weight [heads * H, D] that makes heads, as [D, heads, H]."""
    split = by_heads(num_heads, head_size)
    return lambda tensor: split(tensor).transpose(2, 0, 1)


def linear_rules(pattern: str, target: str) -> tuple[WeightRule, ...]:
    """A linear layer stored [out, in]; its bias is unknown to the loader if the model has none."""
    return (
        WeightRule(pattern + r"\.weight", target + ".weight", transposed),
        WeightRule(pattern + r"\.bias", target + ".bias"),
    )


def attention_rules(config: ModelConfig, pattern: str, output: str) -> tuple[WeightRule, ...]:
    """Separate q, k and v (fused here) and the output projection of layer group 1, all [out, in].

    Args:
        config: the model's.
        pattern: what comes before `q_proj` in the names; its only group is the layer's number.
        output: the output projection's name.
    """
    num_heads, num_kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    ours, rules, start = r"layers.\1.attention.", [], 0
    for name, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
        weight, bias = (rf"{pattern}{name}_proj\.{part}" for part in ("weight", "bias"))
        rules.append(WeightRule(weight, ours + "qkv.weight", output_heads(heads, size), 1, start))
        rules.append(WeightRule(bias, ours + "qkv.bias", by_heads(heads, size), 0, start))
        start += heads
    weight = rf"{pattern}{output}\.weight"
    rules.append(WeightRule(weight, ours + "output.weight", input_heads(num_heads, size)))
    rules.append(WeightRule(rf"{pattern}{output}\.bias", ours + "output.bias"))
    return tuple(rules)


def head_rule(tied: bool) -> WeightRule:
    """The output head; a tied one may be stored as a copy of the embedding, which is ignored."""
    return WeightRule(r"lm_head\.weight", None if tied else "lm_head.weight")
