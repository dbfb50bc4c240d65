"""Train the model that ships with jpaged. The random questions are generated during the training.

    python -m tools.tiny.train --out third --resume jpaged/assets/tiny --seconds 420

The optimizer is Muon for the matrices of the layers, and Adam for the other parameters, with
warm-up and cosine decay. (After 300 steps the loss was 0.34 with Muon, and 0.57 with AdamW.)
Parameters are float32, and the computation is in bfloat16. Seed and step number determine a batch.
Worker processes make the batches. One call of the compiled program (a launch) runs several training
steps, so that the device never waits.

A run ends after the given steps or seconds, whichever comes first, and the learning rate decays
accordingly. A run that ends after the given steps is repeatable, up to rounding. The program writes
a checkpoint every minute, and evaluates the model at the end.
"""

import argparse
import collections
import functools
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from tools.tiny.checkpoint import load_checkpoint, save_checkpoint
from tools.tiny.data import BatchShape, Rows, make_batch
from tools.tiny.evaluate import as_markdown, evaluate, report_of
from tools.tiny.model import Config, Params, forward, init

LAUNCH = 8  # One call of the compiled program (a launch) runs `LAUNCH` training steps.
AHEAD = 16  # The worker processes make the batches for `AHEAD` program calls in advance.
IN_FLIGHT = 3  # At most `IN_FLIGHT` program calls are queued on the device.
WARM_UP = 200  # The learning rate rises during `WARM_UP` steps.

Batch = tuple[Rows, Rows]


def stacked(params: Params) -> Params:
    """Stack each kind of layer parameter over all layers, to one array [layers, ...].

    The optimizer then handles few arrays.
    """
    kinds = {name.split(".", 3)[3] for name in params if name.startswith("model.layers.")}
    num_layers = 1 + max(int(n.split(".")[2]) for n in params if n.startswith("model.layers."))
    whole = {name: v for name, v in params.items() if not name.startswith("model.layers.")}
    layers = {
        kind: jnp.stack([params[f"model.layers.{i}.{kind}"] for i in range(num_layers)])
        for kind in sorted(kinds)
    }
    return whole | layers


def unstacked(params: Params) -> Params:
    """Return the parameters of each layer as separate arrays: the inverse of `stacked`."""
    whole = {name: v for name, v in params.items() if name.startswith("model.")}
    layers = {
        f"model.layers.{i}.{kind}": value[i]
        for kind, value in params.items()
        if not kind.startswith("model.")
        for i in range(value.shape[0])
    }
    return whole | layers


def _orthogonalised(params: Any) -> Any:
    """Return the dimension numbers that Muon needs for each matrix of a layer, and None for other
    parameters."""
    return {
        name: contrib.MuonDimensionNumbers(1, 2) if "_proj" in name else None for name in params
    }


# The optimizer has no learning rate, because `train_steps` multiplies the updates by it.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    contrib.muon(
        1.0,
        consistent_rms=0.2,
        weight_decay=0.05,
        adam_b2=0.98,
        muon_weight_dimension_numbers=_orthogonalised,
    ),
)


def loss_of(params: Params, config: Config, batch: Batch) -> jax.Array:
    """Return the mean cross entropy of the tokens that the loss counts, computed in bfloat16."""
    half = unstacked({name: value.astype(jnp.bfloat16) for name, value in params.items()})
    (loss, tokens), (long_loss, long_tokens) = (_loss_sum(half, config, rows) for rows in batch)
    return (loss + long_loss) / (tokens + long_tokens)


def _loss_sum(params: Params, config: Config, rows: Rows) -> tuple[jax.Array, jax.Array]:
    tokens, loss, segments = (jnp.asarray(array, jnp.int32) for array in rows)
    logits = forward(params, config, tokens, segments)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    weights = loss[:, 1:].astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("params", "state"))
def train_steps(
    params: Params, state: Any, batches: Batch, rates: jax.Array, config: Config
) -> tuple[Params, Any, jax.Array]:
    """Run one step for each pair of a batch and a learning rate.

    Returns:
        The new parameters, the new optimizer state, and the mean loss of the steps.
    """

    def step(carry: tuple[Params, Any], given: tuple[Batch, jax.Array]) -> Any:
        (params, state), (batch, rate) = carry, given
        loss, gradients = jax.value_and_grad(loss_of)(params, config, batch)
        updates: Any
        updates, state = OPTIMIZER.update(gradients, state, params)
        return ({name: params[name] + rate * updates[name] for name in params}, state), loss

    (params, state), losses = jax.lax.scan(step, (params, state), (batches, rates))
    return params, state, jnp.mean(losses)


class Progress:
    """Progress of a run: the larger of (step / steps) and (elapsed / seconds)."""

    def __init__(self, steps: int, seconds: float):
        self._steps, self._seconds, self._start = steps, seconds, time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._start

    def at(self, step: int) -> float:
        """Return the progress at `step`, from 0 at the start to 1 at the end."""
        return min(1.0, max(step / self._steps, self.elapsed / self._seconds))

    def rate(self, step: int) -> float:
        """Return the learning rate at `step`, relative to the maximum.

        It rises linearly during the warm-up, and decays by a cosine of the progress.
        """
        return min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * self.at(step))) / 2


def train(
    params: Params,
    config: Config,
    launches: Iterator[Batch],
    progress: Progress,
    peak: float,
    keep: Path | None = None,
) -> Params:
    """Train until the limit of steps or seconds in `progress` is reached.

    If `keep` is given, save a checkpoint to this folder every minute.
    """
    params = stacked(params)
    state, losses, minute = OPTIMIZER.init(params), collections.deque[jax.Array](), 1
    for first, batches in zip(itertools.count(0, LAUNCH), launches, strict=False):
        if progress.at(first) >= 1:
            break
        rates = np.array([progress.rate(first + i) * peak for i in range(LAUNCH)], np.float32)
        params, state, loss = train_steps(params, state, jax.device_put(batches), rates, config)
        losses.append(loss)
        if len(losses) > IN_FLIGHT:
            mean = float(losses.popleft())
            if first % (25 * LAUNCH) == 0:
                told = f"loss {mean:.5f} rate {rates[0]:.2e} {progress.elapsed:.0f} s"
                print(f"step {first} {told}", flush=True)
        if keep is not None and progress.elapsed > 60 * minute:
            save_checkpoint(keep / f"minute_{minute}", unstacked(params), config)
            minute += 1
    print(f"{progress.elapsed:.0f} s", flush=True)
    return unstacked(params)


def make_launch(seed: int, first: int, shape: BatchShape) -> Batch:
    """Return the batches of `LAUNCH` steps from step `first` on, stacked along a new first axis."""
    made = [make_batch(seed, first + i, shape) for i in range(LAUNCH)]
    short, long = zip(*made, strict=True)
    return _joined(short), _joined(long)


def _joined(rows: tuple[Rows, ...]) -> Rows:
    return Rows(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))


def stream_launches(seed: int, shape: BatchShape, workers: int) -> Generator[Batch]:
    """Yield the training data for one program call after another, without end.

    One program call (a launch) runs `LAUNCH` training steps. Worker processes make the data for up
    to `AHEAD` calls in advance.
    """
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        make = functools.partial(pool.apply_async, make_launch)
        pending = [make((seed, i * LAUNCH, shape)) for i in range(AHEAD)]
        for i in itertools.count(AHEAD):
            yield pending.pop(0).get()
            pending.append(make((seed, i * LAUNCH, shape)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for all that is written")
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="for training, at most")
    parser.add_argument("--resume", type=Path, help="start from the checkpoint in this folder")
    parser.add_argument("--rate", type=float, default=8e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--rows", type=int, default=BatchShape.short_rows)
    parser.add_argument("--long-rows", type=int, default=BatchShape.long_rows)
    parser.add_argument("--examples", type=int, default=1000, help="of the evaluation; 0: without")
    args = parser.parse_args()
    progress, config = Progress(args.steps, args.seconds), Config()
    params = init(jax.random.key(args.seed), config)
    if args.resume:
        params, old = load_checkpoint(args.resume, jnp.dtype("float32"))
        config = replace(old, max_position_embeddings=config.max_position_embeddings)
    shape = BatchShape(args.rows, long_rows=args.long_rows)
    print(f"{jax.devices()}, {vars(args)}, {shape}", flush=True)
    launches = stream_launches(args.seed, shape, args.workers)
    params = train(params, config, launches, progress, args.rate, args.out)
    save_checkpoint(args.out / "final", params, config)
    launches.close()
    if not args.examples:
        return
    report = evaluate(params, config, args.examples)
    print(as_markdown(report), f"{progress.elapsed:.0f} s", flush=True)
    written = report_of(report, args.examples, "float32")
    (args.out / "evaluation.json").write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
