"""How a checkpoint's tensors become a model's parameters: the rules a family gives the loader."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def identity(tensor: np.ndarray) -> np.ndarray:
    """The transform of a tensor whose layout is already ours."""
    return tensor


@dataclass(frozen=True)
class WeightRule:
    """Where one kind of checkpoint tensor goes.

    A parameter's path is the dotted path of its `nnx.Param` in the model, such as
    `layers.0.attention.qkv.weight`. Several rules may fill one (fused) parameter, each a piece of it.

    Attributes:
        pattern: regular expression that must match the whole of a checkpoint tensor's name.
        target: path of the parameter, with references to the pattern's groups
            (`r"layers.\\1.attention.qkv.weight"`). None: the tensor is known and not needed, such as
            a causal-mask buffer or the copy of a tied output head.
        transform: checkpoint layout to the layout of the piece. Works on any numpy array,
            ml_dtypes' bfloat16 included; may return a view.
        axis: the axis of the fused parameter along which this piece lies; None: the piece is the
            whole parameter.
        start: index along `axis` at which the piece begins.
    """

    pattern: str
    target: str | None
    transform: Callable[[np.ndarray], np.ndarray] = identity
    axis: int | None = None
    start: int = 0
