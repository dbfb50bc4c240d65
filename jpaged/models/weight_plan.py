"""Which tensor fills which part of which parameter, proven complete before any weight is read."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jpaged.models.checkpoint import SUPPORTED_DTYPES, CheckpointError, TensorInfo, named_list
from jpaged.models.weights import WeightRule

Specs = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Placement:
    """One tensor and its place: it fills `start:stop` of `axis` of the parameter at `path`.

    `shape` is the tensor's in the parameter's layout; `order` names its axes as they lie in the
    file, the slowest first.
    """

    tensor: TensorInfo
    rule: WeightRule
    path: str
    axis: int
    start: int
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Index along `axis` at which the piece ends."""
        return self.start + self.shape[self.axis]


class _Problems:
    """What is wrong with a checkpoint, by kind, so that one error tells all of it."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, what: str) -> None:
        self._by_kind[kind].append(what)

    def raise_if_any(self) -> None:
        if self._by_kind:
            listed = "; ".join(
                f"{kind} ({len(names)}): {named_list(names)}"
                for kind, names in self._by_kind.items()
            )
            raise CheckpointError(f"The checkpoint does not fit the model. {listed}.")


def plan_weights(
    tensors: Sequence[TensorInfo], rules: Sequence[WeightRule], specs: Specs
) -> list[Placement]:
    """Give every tensor its place and prove that every parameter is filled exactly once.

    The places come in the order of their tensors.

    Args:
        tensors: all tensors of the checkpoint.
        rules: the family's rules.
        specs: shape and dtype of each parameter by path.

    Raises:
        CheckpointError: unknown tensors, missing parameters, wrong shapes or dtypes, a tensor that
            two rules match, a place filled twice, a fused parameter with a missing piece. One
            error tells all of them.
    """
    problems = _Problems()
    placements: list[Placement] = []
    pieces: dict[str, list[Placement]] = defaultdict(list)
    faulty: set[str] = set()  # parameters a wrong tensor was meant for: not missing as well
    compiled = [(re.compile(rule.pattern), rule) for rule in rules]
    for tensor in tensors:
        rule, path = _find_target(tensor, compiled, specs, problems)
        if rule is None or path is None:
            continue
        if placement := _place(tensor, rule, path, specs[path].shape, problems):
            placements.append(placement)
            pieces[path].append(placement)
        else:
            faulty.add(path)
    for path in [path for path in specs if path not in faulty]:
        _check_filled(path, specs[path].shape, pieces[path], rules, problems)
    problems.raise_if_any()
    return placements


def _find_target(
    tensor: TensorInfo,
    compiled: Sequence[tuple[re.Pattern[str], WeightRule]],
    specs: Specs,
    problems: _Problems,
) -> tuple[WeightRule, str] | tuple[None, None]:
    """The tensor's rule and the path of its parameter; None: to be ignored, or reported."""
    name = tensor.name
    matches = [(match, rule) for regex, rule in compiled if (match := regex.fullmatch(name))]
    if len(matches) > 1:
        patterns = " and ".join(rule.pattern for _, rule in matches)
        problems.add("tensors matched by two rules", f"{name} by {patterns}")
        return None, None
    if not matches:
        problems.add("unknown tensors", name)
        return None, None
    match, rule = matches[0]
    path = None if rule.target is None else match.expand(rule.target)
    if path is None:
        return None, None
    if path not in specs:
        problems.add("unknown tensors", f"{name} (the model has no {path})")
        return None, None
    return rule, path


def _place(
    tensor: TensorInfo, rule: WeightRule, path: str, whole: tuple[int, ...], problems: _Problems
) -> Placement | None:
    """The tensor's place in its parameter; None: its dtype or shape is wrong and was reported."""
    if tensor.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(SUPPORTED_DTYPES)
        problems.add("wrong dtypes", f"{tensor.name} is {tensor.dtype}, supported are {supported}")
        return None
    got, order = _layout(tensor, rule) or (None, ())
    if got is not None and _fits(got, rule, whole):
        return Placement(tensor, rule, path, rule.axis or 0, rule.start, got, order)
    became = "has no layout" if got is None else f"makes {list(got)}"
    part = "" if rule.axis is None else f", axis {rule.axis} from {rule.start}"
    problems.add(
        "wrong shapes",
        f"{tensor.name} {list(tensor.shape)} {became} for {path} {list(whole)}{part}",
    )
    return None


def _layout(tensor: TensorInfo, rule: WeightRule) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape that the transform makes of the tensor, and its axes in the order of the file.

    None: the transform refuses the tensor, or does more than to order and split its axes.
    """
    blank = np.empty(tensor.shape, np.uint8)  # never touched, so it takes no memory
    try:
        layout = rule.transform(blank)
    except (ValueError, IndexError, TypeError):
        return None
    order = tuple(sorted(range(layout.ndim), key=lambda axis: -layout.strides[axis]))
    is_run = layout.size == blank.size and layout.transpose(order).flags.c_contiguous
    return (layout.shape, order) if is_run and np.may_share_memory(layout, blank) else None


def _fits(got: tuple[int, ...], rule: WeightRule, whole: tuple[int, ...]) -> bool:
    axis = rule.axis
    if axis is None or len(got) != len(whole):
        return got == whole
    others_agree = got[:axis] + got[axis + 1 :] == whole[:axis] + whole[axis + 1 :]
    return others_agree and rule.start + got[axis] <= whole[axis]


def _check_filled(
    path: str,
    shape: tuple[int, ...],
    pieces: Sequence[Placement],
    rules: Sequence[WeightRule],
    problems: _Problems,
) -> None:
    """Report a parameter that its pieces leave partly empty or fill twice."""
    if not pieces:
        sources = _unused_patterns(path, rules, pieces) or "no rule"
        problems.add("missing parameters", f"{path} (comes from {sources})")
        return
    axis, filled, has_gap = pieces[0].axis, 0, False
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.stop)):
        if piece.start < filled or piece.axis != axis:
            names = " and ".join(other.tensor.name for other in pieces)
            problems.add("parameters filled twice", f"{path} by {names}")
            return
        has_gap |= piece.start > filled
        filled = piece.stop
    if has_gap or filled < shape[axis]:
        lacking = _unused_patterns(path, rules, pieces) or "more: its pieces are too small"
        problems.add(
            "parameters with a missing piece", f"{path} along axis {axis} (lacks {lacking})"
        )


def _unused_patterns(path: str, rules: Sequence[WeightRule], pieces: Sequence[Placement]) -> str:
    """The patterns of the rules that could fill the parameter and did not."""
    used = {piece.rule.pattern for piece in pieces}

    def can_fill(rule: WeightRule) -> bool:
        literal = re.split(r"\\\d+|\\g<\w+>", rule.target or "")
        return bool(re.fullmatch(".+".join(map(re.escape, literal)), path))

    return " and ".join(
        rule.pattern for rule in rules if can_fill(rule) and rule.pattern not in used
    )
