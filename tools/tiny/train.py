"""Train the embedded model on questions made on the fly.

    python -m tools.tiny.train --out first --steps 12500
    python -m tools.tiny.train --out jpaged/assets/tiny --resume first \
        --steps 4000 --seed 1 --rate 4e-3

Muon for the layers' matrices and Adam for the rest, warm-up and cosine decay; float32 parameters,
bfloat16 arithmetic. (After 300 steps the loss was 0.34 with Muon, 0.57 with AdamW.) Batches are a
function of seed and step, made by worker processes, so a run is repeatable up to the device's own
rounding. A run that resumes ends with the mean of its first and last parameters. The first run
takes 7.5 minutes on an H200, the second 2.5.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tools.tiny.checkpoint import load_checkpoint, save_checkpoint
from tools.tiny.data import LAST_SHARES, SHARES, BatchShape, Rows, make_batch
from tools.tiny.model import Config, Params, forward, init

AHEAD = 64  # batches that the workers may be ahead of the device

Batch = tuple[Rows, Rows]


def _orthogonalised(params: Any) -> Any:
    """Muon's parameters: the matrices of the layers."""
    return {
        name: None if "norm" in name or "embed" in name else contrib.MuonDimensionNumbers()
        for name in params
    }


OPTIMIZER = optax.chain(  # its updates are for a learning rate of 1
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
    """Mean cross entropy over the tokens that bear loss, computed in bfloat16."""
    half = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    (loss, tokens), (long_loss, long_tokens) = (_loss_sum(half, config, rows) for rows in batch)
    return (loss + long_loss) / (tokens + long_tokens)


def _loss_sum(params: Params, config: Config, rows: Rows) -> tuple[jax.Array, jax.Array]:
    tokens, loss, segments = (jnp.asarray(array, jnp.int32) for array in rows)
    logits = forward(params, config, tokens, segments)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    weights = loss[:, 1:].astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("params", "state"))
def train_step(
    params: Params, state: Any, batch: Batch, rate: jax.Array, config: Config
) -> tuple[Params, Any, jax.Array]:
    """One step: new parameters, new optimizer state, the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(params, config, batch)
    updates: Any
    updates, state = OPTIMIZER.update(gradients, state, params)
    return {name: params[name] + rate * updates[name] for name in params}, state, loss


def train(
    params: Params, config: Config, batches: Iterator[Batch], steps: int, peak: float
) -> tuple[Params, list[float]]:
    """Train for `steps` steps; returns the parameters and some of the losses on the way."""
    rates = optax.warmup_cosine_decay_schedule(0.0, peak, min(500, steps // 10 + 1), steps)
    state, losses, start = OPTIMIZER.init(params), [], time.perf_counter()
    for step, batch in enumerate(itertools.islice(batches, steps)):
        rate = jnp.float32(rates(step))
        params, state, loss = train_step(params, state, jax.device_put(batch), rate, config)
        if step % max(1, steps // 100) == 0 or step == steps - 1:
            losses.append(float(loss))
            print(f"{step} {losses[-1]:.5f} {time.perf_counter() - start:.0f} s", flush=True)
    return params, losses


def stream_batches(
    seed: int, shape: BatchShape, shares: Mapping[str, int], workers: int
) -> Generator[Batch]:
    """Endless batches in order, made by worker processes a bounded number of steps ahead."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        make = functools.partial(pool.apply_async, make_batch)
        pending = [make((seed, step, shape, shares)) for step in range(AHEAD)]
        for step in itertools.count(AHEAD):
            yield pending.pop(0).get()
            pending.append(make((seed, step, shape, shares)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12500)
    parser.add_argument("--resume", type=Path, help="start from the checkpoint in this folder")
    parser.add_argument("--rate", type=float, default=8e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--rows", type=int, default=BatchShape.short_rows)
    parser.add_argument("--long-rows", type=int, default=BatchShape.long_rows)
    args = parser.parse_args()
    config = Config()
    params, shares = init(jax.random.key(args.seed), config), SHARES
    if args.resume:
        params, config = load_checkpoint(args.resume, jnp.dtype("float32"))
        shares = LAST_SHARES
    shape = BatchShape(args.rows, long_rows=args.long_rows)
    print(f"{args.steps} steps, seed {args.seed}, {shape}", flush=True)
    batches = stream_batches(args.seed, shape, shares, args.workers)
    start = {name: jnp.array(value) for name, value in params.items()}
    params, _ = train(params, config, batches, args.steps, args.rate)
    if args.resume:  # the mean of both ends generalises better than either
        params = {name: (start[name] + params[name]) / 2 for name in params}
    save_checkpoint(args.out, params, config)


if __name__ == "__main__":
    main()
