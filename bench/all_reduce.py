"""Times a sum over the GPUs of this machine: our kernel's, XLA's own and NCCL's.

    python -m bench.all_reduce [--devices 2] [--repeats 5]

How: a program is a chain of products and sums, each of the sum before; its time, less that of the
same chain without sums, over their number. It gives back what it was given, in the same memory, or
XLA would write its CUDA graph anew for each launch, which takes longer than the sums. Programs are
launched back to back and waited for once; the median of the blocks counts. XLA reads what it sums
with when its process starts, so each way has a process. Each checks what it gives.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged.compile.recipes import SYNCHRONOUS_COLLECTIVES
from jpaged.models.sharding import MESH_AXIS, barrier_all_reduce, make_mesh
from jpaged.runtime.peer_memory import PeerMemory, can_use_peer_memory
from pallas_kernels import device_sum

WIDTH = 4096
ROWS = (1, 8, 64, 256, 2048)
SUMS = 64  # of a program
LAUNCHES = 10  # of a block
NCCL = "--xla_gpu_experimental_use_collective_kernels=-ALL_REDUCE"
WAYS = {"peer memory": "", "XLA": "", "NCCL": NCCL}
MARKS = {8: 6.0, 64: 10.0}
"""Microseconds, of two H200s (issue 26)."""

SECONDS = 240
"""After which a way is given up."""


def chain(mesh: Mesh, *, sums: bool, by_peers: bool) -> Callable:
    """x -> x, by as many products as sums."""

    def body(x, share, peers):
        header = peers if by_peers else None
        x += barrier_all_reduce(jnp.zeros((1, 1), x.dtype), header)
        for buffer_index in range(SUMS):
            x = lax.optimization_barrier(x * share[0].astype(x.dtype))
            x = (
                device_sum(x, MESH_AXIS, header=header, buffer_index=buffer_index % 2)
                if sums
                else x + x
            )
        return x

    split = PartitionSpec(MESH_AXIS)
    specs = PartitionSpec(), split, split
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return jax.jit(mapped, donate_argnums=0, compiler_options=SYNCHRONOUS_COLLECTIVES)


def seconds(program: Callable, x: jax.Array, repeats: int) -> tuple[float, jax.Array]:
    """Of a call of x -> x, the median of blocks; and what came of x."""
    taken = []
    for _ in range(1 + repeats):  # the first warms up
        begun = time.perf_counter()
        for _ in range(LAUNCHES):
            x = program(x)
        jax.block_until_ready(x)
        taken.append((time.perf_counter() - begun) / LAUNCHES)
    return statistics.median(taken[1:]), x


def measure(mesh: Mesh, way: str, rows: int, repeats: int) -> dict:
    """A row of the record; microseconds a sum."""
    by_peers = way == "peer memory"
    memory = PeerMemory(mesh) if by_peers else None
    peers = jnp.zeros(mesh.size, jnp.int32) if memory is None else memory.headers
    given = (np.arange(rows * WIDTH).reshape(rows, WIDTH) % 7 + 1).astype(jnp.bfloat16)
    # Shares of 1, so that a chain gives back what it was given.
    share = jnp.full(mesh.size, 1 / mesh.size, jnp.float32)
    half = jnp.full(mesh.size, 0.5, jnp.float32)
    with_sums, without = (chain(mesh, sums=sums, by_peers=by_peers) for sums in (True, False))

    def timed(program: Callable, factor: jax.Array) -> tuple[float, bool]:
        """And whether it gives back what it was given."""
        x = jax.device_put(given, NamedSharding(mesh, PartitionSpec()))
        taken, x = seconds(lambda x: program(x, factor, peers), x, repeats)
        copies = [np.asarray(shard.data) for shard in x.addressable_shards]
        return taken, all((copy == given).all() for copy in copies)

    whole, is_right = timed(with_sums, share)
    alone, _ = timed(without, half)
    if memory is not None:
        memory.check_devices()
    return {
        "way": way,
        "rows": rows,
        "bytes": given.nbytes,
        "us": round((whole - alone) / SUMS * 1e6, 2),
        "us_with_product": round(whole / SUMS * 1e6, 2),
        "right": is_right,
    }


def work(way: str, count: int, repeats: int) -> None:
    """One way, in this process; a line of JSON a row."""
    mesh = make_mesh(jax.devices(), count)
    if mesh is None:
        raise SystemExit("--devices must be at least 2")
    if way == "peer memory" and not can_use_peer_memory(
        mesh.devices.ravel().tolist(), jnp.bfloat16
    ):
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way", choices=[*WAYS], help="only this one, in this process")
    args = parse_arguments(parser)
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
