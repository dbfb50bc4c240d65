"""A model of the time of a step, fitted to steps recorded on a GPU.

The seconds of a step of N rows (tokens, padded to the engine's buckets) in L layers are the sum of

    step + L layer                                   launching the step; small kernels of each layer
    join(weight bytes / bandwidth, 2 weights N / rate)      GEMMs of the layers, and of the head
    bytes of keys and values / kv_bandwidth          attention of sequences with one new token
    4 L heads head_size pairs / prefill_rate         attention of the other sequences, by the number
                                                     of (query, key) pairs
    L N hidden element                               norms, activations, writes: all but GEMMs
    L mixed                                          if the step has sequences of both kinds

Here join(a, b) = (a^p + b^p)^(1/p), which is close to the larger of a and b if one is much larger.
The nine coefficients minimize the squares of log(modelled time / recorded time), so that each point
counts by its relative error. Two more coefficients give the time of a transfer between device and
host: `swap + bytes / swap_bandwidth`. All coefficients are for blocks of 16 slots. For the other
recorded block sizes, `kv_slowdown` is the median factor by which reading keys and values takes
longer. Block sizes that were not recorded have the factor of the nearest recorded size.

The data are in `bench/results/step_times_<shape>_nvidia-h200.json`, which `bench.step_times` writes
on an H200. A shape without a file has the data of OPT-13B. If that file is missing too, the data
are in `recorded_steps.json` in this folder: single steps from results and docs, with their sources.
`python -m bench.paper.device_model` prints every point with its error.

Other GPUs are not measured. Their bandwidths and rates are the fitted values times the ratio of the
published peaks (`GPUS`); fixed times are the fitted values. With several GPUs, each holds a shard
of every layer. The GPUs sum partial results twice per layer, which takes `ALL_REDUCE_SECONDS` plus
the time of a ring all-reduce over `nvlink`.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares  # JAX depends on scipy, so scipy is always installed.
from tabulate import tabulate

RECORDED = Path(__file__).parent / "recorded_steps.json"
RESULTS = Path(__file__).parent.parent / "results"
MEASURED_SHAPE = "opt-13b"
FITTED_GPU = "h200"
BLOCK_SIZE = 16  # The coefficients are fitted to steps with this block size.
ITEM_BYTES = 2  # Weights and the KV cache are in bfloat16 or float16.
ALL_REDUCE_SECONDS = 10e-6
"""Assumed time of a small all-reduce between GPUs of one host: a usual latency of NCCL over NVLink.
"""


class StepWork(NamedTuple):
    """The amount of work of one step: numbers of sequences, tokens, keys and rows.

    Attributes:
        decode_seqs: Sequences with one token.
        context_tokens: Total number of keys that these sequences read.
        prompt_seqs: Sequences with more than one token.
        prompt_tokens: Total number of tokens of the prompt sequences.
        prompt_pairs: Total number of (query, key) pairs of the prompt sequences.
        padded_tokens: Tokens that GEMMs compute, including padding.
        logits_rows: Rows of the output head's GEMM.
    """

    decode_seqs: int
    context_tokens: int
    prompt_seqs: int
    prompt_tokens: int
    prompt_pairs: int
    padded_tokens: int
    logits_rows: int


class Gpu(NamedTuple):
    """Published peak rates of a GPU.

    Attributes:
        bandwidth: Bytes per second of the memory.
        flops: FLOP/s of dense products in bfloat16 or float16.
        pcie: Bytes per second between host and GPU.
        nvlink: Bytes per second over NVLink in one direction.
    """

    bandwidth: float
    flops: float
    pcie: float
    nvlink: float


GPUS = {
    "h200": Gpu(4.8e12, 989e12, 64e9, 450e9),
    "a100-40gb": Gpu(1.555e12, 312e12, 32e9, 300e9),
    "a100-80gb": Gpu(2.039e12, 312e12, 32e9, 300e9),
}


class ModelShape(NamedTuple):
    """Shape of a model. The feed-forward has three GEMMs if it is `gated`, otherwise two."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    gated: bool = False

    @property
    def layer_params(self) -> int:
        """Number of weights in the GEMMs of a layer."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.hidden * (heads * self.head_size + (2 + self.gated) * self.ffn)

    @property
    def head_params(self) -> int:
        """Number of weights in the output head."""
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * ITEM_BYTES


MODELS = {
    "opt-13b": ModelShape(40, 5120, 40, 40, 128, 20480, 50272),
    "opt-66b": ModelShape(64, 9216, 72, 72, 128, 36864, 50272),
    "opt-175b": ModelShape(96, 12288, 96, 96, 128, 49152, 50272),
    "llama-13b": ModelShape(40, 5120, 40, 40, 128, 13824, 32000, gated=True),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True),
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072, 151936, gated=True),
    "qwen2.5-1.5b": ModelShape(28, 1536, 12, 2, 128, 8960, 151936, gated=True),
    "qwen2.5-14b": ModelShape(48, 5120, 40, 8, 128, 13824, 152064, gated=True),
}


@dataclass(frozen=True)
class Coefficients:
    """Fitted coefficients: times in seconds, bandwidths in bytes per second, rates in FLOP/s."""

    step: float = 1e-4
    layer: float = 1e-5
    bandwidth: float = 4e12
    rate: float = 7e14
    joint: float = 2.0  # exponent p of the function `join`
    kv_bandwidth: float = 4e12
    prefill_rate: float = 3e14
    element: float = 1e-12  # `element` is in seconds per row and per element of the hidden state
    mixed: float = 0.0
    swap: float = 1e-3
    swap_bandwidth: float = 5e10
    kv_slowdown: tuple[tuple[int, float], ...] = ()  # pairs (block size, factor)

    def slowdown(self, block_size: int) -> float:
        """Return the factor by which a block size slows reading keys and values.

        The result is the factor of the nearest block size that was recorded.
        """
        if block_size == BLOCK_SIZE or not self.kv_slowdown:
            return 1.0
        known = ((BLOCK_SIZE, 1.0), *self.kv_slowdown)
        return min(known, key=lambda pair: abs(math.log2(pair[0] / block_size)))[1]


LIMITS = {"bandwidth": 4.42e12, "kv_bandwidth": 4.42e12, "rate": 7.9e14, "prefill_rate": 6.6e14}
"""Upper limits of coefficients in the fit: the highest rates that were measured on an H200.

Without limits, the data do not determine all coefficients: for example, faster GEMMs with slower
norms would fit equally well.
"""

_STEP_NAMES = [f.name for f in fields(Coefficients) if not f.name.startswith(("swap", "kv_slow"))]


@dataclass(frozen=True)
class DeviceModel:
    """Times of one model's steps on a server.

    Attributes:
        name: Model and GPUs.
        shape: Shape of the model.
        coefficients: Coefficients of one GPU.
        num_gpus: Number of GPUs. Each holds a shard of every layer.
        nvlink: Bytes per second that a GPU sends to another GPU.
    """

    name: str
    shape: ModelShape
    coefficients: Coefficients
    num_gpus: int = 1
    nvlink: float = math.inf

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block in all layers and on all GPUs."""
        return block_size * self.shape.kv_bytes

    def step_seconds(self, work: StepWork, block_size: int = BLOCK_SIZE) -> float:
        """Return the seconds of a step: `busy_seconds` plus the time to launch the step."""
        return self.busy_seconds(work, block_size) + self.coefficients.step

    def kv_seconds(self, work: StepWork) -> float:
        """Return the seconds to read the keys and values of decode rows, for blocks of 16 slots."""
        num_bytes = work.context_tokens * self.shape.kv_bytes
        return num_bytes / (self.coefficients.kv_bandwidth * self.num_gpus)

    def busy_seconds(self, work: StepWork, block_size: int = BLOCK_SIZE) -> float:
        """Return the seconds during which the device computes a step, without the launch."""
        shape, by, gpus = self.shape, self.coefficients, self.num_gpus
        rows, layers = work.padded_tokens, shape.num_layers
        seconds = layers * by.layer + self._product(layers * shape.layer_params, rows)
        seconds += self._product(shape.head_params, work.logits_rows)
        seconds += self.kv_seconds(work) * by.slowdown(block_size)
        pair_flops = 4 * layers * shape.num_heads * shape.head_size
        seconds += work.prompt_pairs * pair_flops / (by.prefill_rate * gpus)
        seconds += layers * rows * shape.hidden * by.element
        if work.decode_seqs and work.prompt_seqs:
            seconds += layers * by.mixed
        if gpus > 1:
            sent = 2 * (gpus - 1) / gpus * rows * shape.hidden * ITEM_BYTES
            seconds += 2 * layers * (ALL_REDUCE_SECONDS + sent / self.nvlink)
        return seconds

    def _product(self, num_weights: int, rows: int) -> float:
        by = self.coefficients
        weights = num_weights / self.num_gpus
        read, computed = ITEM_BYTES * weights / by.bandwidth, 2 * weights * rows / by.rate
        return (read**by.joint + computed**by.joint) ** (1 / by.joint)

    def decode_seconds(self, num_seqs: int, context: float) -> float:
        """Return the seconds of an unpadded decode step of sequences with `context` tokens."""
        rows = max(num_seqs, 8)
        return self.step_seconds(StepWork(num_seqs, int(num_seqs * context), 0, 0, 0, rows, rows))

    def prefill_seconds(self, lengths: Sequence[int]) -> float:
        """Return the seconds of an unpadded step that computes whole prompts."""
        num_tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
        logits = max(len(lengths), 8)
        return self.step_seconds(
            StepWork(0, 0, len(lengths), num_tokens, pairs, max(num_tokens, 64), logits)
        )

    def swap_seconds(self, num_blocks: int, block_size: int) -> float:
        """Return the seconds to transfer blocks between device and host.

        The GPUs transfer their shards concurrently. The runner first gathers the blocks into one
        array, so the time depends on the number of bytes and not on the block size.
        """
        if not num_blocks:
            return 0.0
        by = self.coefficients
        num_bytes = num_blocks * self.block_bytes(block_size)
        return by.swap + num_bytes / (by.swap_bandwidth * self.num_gpus)


def device_model(shape: str = "opt-13b", gpu: str = FITTED_GPU, num_gpus: int = 1) -> DeviceModel:
    """Return the device model of a server.

    Args:
        shape: A key of `MODELS`.
        gpu: A key of `GPUS`.
        num_gpus: Number of GPUs that hold the model.

    Raises:
        ValueError: `shape` or `gpu` is unknown, or `num_gpus` is below 1.
    """
    for name, value, known in (("shape", shape, MODELS), ("gpu", gpu, GPUS)):
        if value not in known:
            raise ValueError(f"{name} {value!r} is unknown: pass one of {', '.join(known)}")
    if num_gpus < 1:
        raise ValueError(f"num_gpus must be at least 1, got {num_gpus}")
    by, here, there = fit(shape).coefficients, GPUS[FITTED_GPU], GPUS[gpu]
    memory, compute = there.bandwidth / here.bandwidth, there.flops / here.flops
    scaled = replace(
        by,
        bandwidth=by.bandwidth * memory,
        kv_bandwidth=by.kv_bandwidth * memory,
        element=by.element / memory,
        rate=by.rate * compute,
        prefill_rate=by.prefill_rate * compute,
        swap_bandwidth=by.swap_bandwidth * there.pcie / here.pcie,
    )
    name = f"{shape} on {num_gpus} x {gpu}" if num_gpus > 1 else f"{shape} on {gpu}"
    return DeviceModel(name, MODELS[shape], scaled, num_gpus, there.nvlink)


# ---- fitting the coefficients to recorded steps


@dataclass(frozen=True)
class FittedPoint:
    """A recorded step or transfer, and the time that the device model predicts for it.

    Attributes:
        what: Text that names the model, the kind of step and the size.
        recorded: Recorded seconds.
        modelled: Predicted seconds.
        source: File that contains the recorded step.
    """

    what: str
    recorded: float
    modelled: float
    source: str

    @property
    def error(self) -> float:
        """Relative error of the predicted time: (predicted - recorded) / recorded."""
        return self.modelled / self.recorded - 1


@dataclass(frozen=True)
class Fit:
    """Coefficients of a `FITTED_GPU`, and the recorded points to which they were fitted."""

    coefficients: Coefficients
    points: tuple[FittedPoint, ...]

    @property
    def mean_error(self) -> float:
        """Mean of the absolute relative errors of all points."""
        return float(np.mean([abs(point.error) for point in self.points]))


@cache
def fit(shape: str = MEASURED_SHAPE) -> Fit:
    """Fit the coefficients for a model shape to the steps that were recorded on an H200.

    Raises:
        ValueError: a file of recorded steps is damaged; the message names it.
    """
    recorded = read_rows(RECORDED)
    paths = [RESULTS / f"step_times_{name}_nvidia-h200.json" for name in (shape, MEASURED_SHAPE)]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return fit_rows(recorded)
    rows = read_rows(path)
    if not any(row["kind"] in _SWAP_KINDS for row in rows):
        rows += [row for row in recorded if row["kind"] in _SWAP_KINDS]
    return fit_rows(rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file of recorded steps. Return the rows that the device model can use, which are the
    rows with a `kind` in `_MODELLED_KINDS`."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            row.setdefault("source", path.name)
            if row["kind"] in _MODELLED_KINDS and not row["seconds"] > 0:
                raise ValueError(f"seconds of a row must be above 0, got {row['seconds']}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the recorded steps in {path} cannot be read: {error!r}") from error
    return [row for row in rows if row["kind"] in _MODELLED_KINDS]


_STEP_KINDS = {"decode", "prefill", "mixed"}
# A row of the kind "swap" has the time of a swap-out and the swap-in of the same blocks.
_SWAP_KINDS = {"swap", "swap_out", "swap_in"}
_KERNEL_KINDS = {"attention"}
_MODELLED_KINDS = _STEP_KINDS | _SWAP_KINDS | _KERNEL_KINDS


def fit_rows(rows: Iterable[Mapping[str, Any]]) -> Fit:
    """Fit the coefficients to recorded rows; `recorded_steps.json` documents the fields of a row.

    A coefficient that no row depends on keeps its default in `Coefficients`.
    """
    rows = list(rows)
    steps = [row for row in rows if row["kind"] in _STEP_KINDS]
    swaps = [row for row in rows if row["kind"] in _SWAP_KINDS]
    by = Coefficients()
    usual = [row for row in steps if row["block_size"] == BLOCK_SIZE]
    if usual:
        by = _fit(by, _names_for(usual), usual)
    if swaps:
        by = _fit(by, ["swap", "swap_bandwidth"], swaps)
    by = replace(by, kv_slowdown=_slowdowns([row for row in rows if row["kind"] in _KERNEL_KINDS]))
    points = [
        FittedPoint(_describe(row), row["seconds"], _modelled(by, row), row["source"])
        for row in [*steps, *swaps]
    ]
    return Fit(by, tuple(points))


def _slowdowns(kernels: list[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    """Return pairs (block size, attention time / attention time with blocks of `BLOCK_SIZE`)."""
    usual = {_point(row): row["seconds"] for row in kernels if row["block_size"] == BLOCK_SIZE}
    found: dict[int, list[float]] = defaultdict(list)
    for row in kernels:
        if row["block_size"] != BLOCK_SIZE and _point(row) in usual:
            found[row["block_size"]].append(row["seconds"] / usual[_point(row)])
    return tuple((size, median(factors)) for size, factors in sorted(found.items()))


def _point(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["model"], row["decode_seqs"], row["context_tokens"]


def _names_for(steps: list[Mapping[str, Any]]) -> list[str]:
    has_mixed = any(row["kind"] == "mixed" for row in steps)
    return [name for name in _STEP_NAMES if has_mixed or name != "mixed"]


def _fit(start: Coefficients, names: list[str], rows: list[Mapping[str, Any]]) -> Coefficients:
    """Fit the coefficients `names` to the rows.

    `start` has the initial values of these coefficients, and the values of all other coefficients.
    The fit varies the logarithms of the coefficients, so that the coefficients stay positive.
    """
    first: dict[str, float] = asdict(start)
    first["mixed"] = first["mixed"] or 1e-6

    def at(logs: np.ndarray) -> Coefficients:
        return replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def errors(logs: np.ndarray) -> list[float]:
        by = at(logs)
        return [math.log(_modelled(by, row) / row["seconds"]) for row in rows]

    guess = np.array([math.log(first[name]) for name in names])
    most = np.array([math.log(LIMITS.get(name, 1e3 * first[name])) for name in names])
    bounds = guess - math.log(1e3), most
    return at(least_squares(errors, np.minimum(guess, most - 0.01), bounds=bounds).x)


def _modelled(by: Coefficients, row: Mapping[str, Any]) -> float:
    model = _model_of(by, row)
    if row["kind"] in _SWAP_KINDS:
        ways = 2 if row["kind"] == "swap" else 1
        return ways * model.swap_seconds(row["blocks"], row["block_size"])
    seconds_of = model.busy_seconds if row.get("busy") else model.step_seconds
    return seconds_of(_work_of(row), row["block_size"])


def _model_of(by: Coefficients, row: Mapping[str, Any]) -> DeviceModel:
    shape = MODELS[row["model"]]
    layers = row.get("num_layers", shape.num_layers)
    return DeviceModel("", shape._replace(num_layers=layers), by)


def _work_of(row: Mapping[str, Any]) -> StepWork:
    return StepWork(*(row[name] for name in StepWork._fields))


def _describe(row: Mapping[str, Any]) -> str:
    if row["kind"] in _SWAP_KINDS:
        return f"{row['model']}: {row['kind']} of {row['blocks']} blocks"
    layers = f", {row['num_layers']} layers" if "num_layers" in row else ""
    layers += f", blocks of {row['block_size']}" if row["block_size"] != BLOCK_SIZE else ""
    parts = []
    if row["decode_seqs"]:
        context = row["context_tokens"] // row["decode_seqs"]
        parts.append(f"{row['decode_seqs']} x 1 after {context}")
    if row["prompt_seqs"]:
        parts.append(f"{row['prompt_seqs']} x {row['prompt_tokens'] // row['prompt_seqs']}")
    rows = " and ".join(parts) or f"{row['padded_tokens']} empty rows"
    return f"{row['model']}{layers}: {rows}{', busy' if row.get('busy') else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The device model's data, coefficients and errors."
    )
    parser.add_argument("--shape", choices=[*MODELS], default=MEASURED_SHAPE)
    found = fit(parser.parse_args().shape)
    columns = ("what", "recorded ms", "modelled ms", "error %", "source")
    rows = [
        (p.what, 1e3 * p.recorded, 1e3 * p.modelled, 100 * p.error, p.source) for p in found.points
    ]
    print(tabulate(rows, columns, floatfmt=",.3f"))
    print()
    print(tabulate(asdict(found.coefficients).items(), ("coefficient", "value"), floatfmt=".4g"))
    worst = max(found.points, key=lambda point: abs(point.error))
    print(f"\nmean error {100 * found.mean_error:.1f} %")
    print(f"worst {100 * worst.error:+.1f} %: {worst.what}")


if __name__ == "__main__":
    main()
