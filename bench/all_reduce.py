"""Times a sum over the GPUs of this machine: our kernel's, XLA's own and NCCL's.

    python -m bench.all_reduce [--devices 2] [--repeats 5]

How: a program is a chain of products and sums, each of the sum before; its time, less that of the
same chain without sums, over their number. Programs are launched back to back and waited for once;
the median of the blocks counts. XLA reads what it sums with when its process starts, so each way
has a process. Each checks what it gives.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from bench.records import print_table, record
from jpaged.models.sharding import AXIS, all_reduce, make_mesh, meet
from jpaged.runtime.peer_memory import PeerMemory, can_exchange

WIDTH = 4096
ROWS = (1, 8, 64, 256, 2048)
SUMS = 64  # of a program
LAUNCHES = 5  # of a block
NCCL = "--xla_gpu_experimental_use_collective_kernels=-ALL_REDUCE"
WAYS = {"peer memory": "", "XLA": "", "NCCL": NCCL}
MARKS = {8: 6.0, 64: 10.0}
"""Microseconds, of two H200s (issue 26)."""

SECONDS = 240
"""After which a way is given up."""


def chain(mesh: Mesh, *, sums: bool, by_peers: bool) -> Callable:
    """x -> x, by as many products as sums."""

    def body(x, share, peers):
        x += meet(jnp.zeros((1, 1), x.dtype), peers if by_peers else None)
        for turn in range(SUMS):
            x = lax.optimization_barrier(x * share[0].astype(x.dtype))
            x = all_reduce(x, peers if by_peers else None, turn % 2) if sums else x + x
        return x

    split = PartitionSpec(AXIS)
    specs = PartitionSpec(), split, split
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    )


def seconds(call: Callable, repeats: int) -> float:
    """Of a call, the median of blocks."""
    jax.block_until_ready([call(), call()])
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        results = [call() for _ in range(LAUNCHES)]
        jax.block_until_ready(results)
        taken.append((time.perf_counter() - begun) / LAUNCHES)
    return statistics.median(taken)


def measure(mesh: Mesh, way: str, rows: int, repeats: int) -> dict:
    """A row of the record; microseconds a sum."""
    by_peers = way == "peer memory"
    memory = PeerMemory(mesh) if by_peers else None
    peers = jnp.zeros(mesh.size, jnp.int32) if memory is None else memory.headers
    x = jnp.asarray(np.arange(rows * WIDTH).reshape(rows, WIDTH) % 7 + 1, jnp.bfloat16)
    # Shares of 1, so that a chain gives back what it was given.
    share = jnp.full(mesh.size, 1 / mesh.size, jnp.float32)
    half = jnp.full(mesh.size, 0.5, jnp.float32)
    with_sums, without = (chain(mesh, sums=sums, by_peers=by_peers) for sums in (True, False))
    got = np.asarray(with_sums(x, share, peers), np.float32)
    if memory is not None:
        memory.check()
    is_right = bool((got == np.asarray(x, np.float32)).all())
    whole = seconds(lambda: with_sums(x, share, peers), repeats)
    alone = seconds(lambda: without(x, half, peers), repeats)
    return {
        "way": way,
        "rows": rows,
        "bytes": x.nbytes,
        "us": round((whole - alone) / SUMS * 1e6, 2),
        "us_with_product": round(whole / SUMS * 1e6, 2),
        "right": is_right,
    }


def work(way: str, count: int, repeats: int) -> None:
    """One way, in this process; a line of JSON a row."""
    mesh = make_mesh(jax.devices(), count)
    if mesh is None:
        raise SystemExit("--devices must be at least 2")
    if way == "peer memory" and not can_exchange(mesh.devices.ravel().tolist(), jnp.bfloat16):
        raise SystemExit("these devices do not exchange through each other's memory")
    for rows in ROWS:
        print(json.dumps(measure(mesh, way, rows, repeats)), flush=True)


def begin(way: str, arguments: list[str]) -> list[dict]:
    """One way, in a process of its own; its rows. What it says besides is passed on."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {WAYS[way]}".strip()
    environment = os.environ | {"XLA_FLAGS": flags, "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, "-m", "bench.all_reduce", "--way", way, *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=SECONDS,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"{way}: {error}", file=sys.stderr)
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way", choices=[*WAYS], help="only this one, in this process")
    args = parser.parse_args()
    if args.way is not None:
        work(args.way, args.devices, args.repeats)
        return
    asked = ["--devices", str(args.devices), "--repeats", str(args.repeats)]
    rows = [row for way in WAYS for row in begin(way, asked)]
    for row in rows:
        if args.devices == 2 and row["way"] == "peer memory" and row["rows"] in MARKS:
            row["to_reach"] = MARKS[row["rows"]]
    print_table(rows)
    print(record("all_reduce", rows, device=f"{args.devices} x {jax.devices()[0].device_kind}"))


if __name__ == "__main__":
    main()
