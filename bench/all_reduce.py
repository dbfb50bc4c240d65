"""Time an all-reduce over the GPUs of this machine: jpaged's kernel, XLA's and NCCL's.

    python -m bench.all_reduce [--devices 2] [--repeats 5]

A program is a chain of multiplications and all-reduces; each works on the previous result. The time
of an all-reduce is (time of the chain - time of the same chain without all-reduces) / number of
all-reduces. The program returns its input in the same memory. Otherwise XLA would rebuild its CUDA
graph for each launch, which takes longer than the all-reduces. A round is ten launches back to
back, after which the script waits for the result; the time is the median over rounds. XLA selects
its all-reduce when the process starts, so each implementation runs in a separate process. Each
process checks its results.
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
SUMS = 64  # all-reduces per program
LAUNCHES = 10  # launches per round
NCCL = "--xla_gpu_experimental_use_collective_kernels=-ALL_REDUCE"
WAYS = {"peer memory": "", "XLA": "", "NCCL": NCCL}
MARKS = {8: 6.0, 64: 10.0}
"""Target in microseconds per all-reduce on two H200s, by number of rows (issue 26)."""

SECONDS = 240
"""Timeout of the process that measures one implementation."""


def chain(mesh: Mesh, *, sums: bool, by_peers: bool) -> Callable:
    """Return a jitted function of (x, share, peers) that runs `SUMS` all-reduces sequentially.

    Before each all-reduce, each device multiplies x by the device's factor in `share`. If the
    factors of all devices add up to 1, the result equals x.

    Args:
        mesh: The devices.
        sums: Whether to run the all-reduces. If false, `x + x` replaces each all-reduce.
        by_peers: Whether the all-reduces use peer memory.
    """

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
    """Run `repeats` rounds of `LAUNCHES` calls. Return the median seconds per call, and the result
    of the last call."""
    taken = []
    for _ in range(1 + repeats):  # the first round warms up
        begun = time.perf_counter()
        for _ in range(LAUNCHES):
            x = program(x)
        jax.block_until_ready(x)
        taken.append((time.perf_counter() - begun) / LAUNCHES)
    return statistics.median(taken[1:]), x


def measure(mesh: Mesh, way: str, rows: int, repeats: int) -> dict:
    """Measure the implementation `way` with an array of `rows` rows. Return the results by name."""
    by_peers = way == "peer memory"
    memory = PeerMemory(mesh) if by_peers else None
    peers = jnp.zeros(mesh.size, jnp.int32) if memory is None else memory.headers
    inputs = (np.arange(rows * WIDTH).reshape(rows, WIDTH) % 7 + 1).astype(jnp.bfloat16)
    # Each device multiplies by a different factor. The factors sum to 1, so each all-reduce
    # restores the input.
    share = jnp.full(mesh.size, 1 / mesh.size, jnp.float32)
    half = jnp.full(mesh.size, 0.5, jnp.float32)
    with_sums, without = (chain(mesh, sums=sums, by_peers=by_peers) for sums in (True, False))

    def timed(program: Callable, factor: jax.Array) -> tuple[float, bool]:
        """Return the seconds per call, and whether the result of the last call equals the input of
        the first call."""
        x = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec()))
        taken, x = seconds(lambda x: program(x, factor, peers), x, repeats)
        copies = [np.asarray(shard.data) for shard in x.addressable_shards]
        return taken, all((copy == inputs).all() for copy in copies)

    whole, is_right = timed(with_sums, share)
    base, _ = timed(without, half)
    if memory is not None:
        memory.check_devices()
    return {
        "way": way,
        "rows": rows,
        "bytes": inputs.nbytes,
        "us": round((whole - base) / SUMS * 1e6, 2),
        "us_with_product": round(whole / SUMS * 1e6, 2),
        "right": is_right,
    }


def run_here(way: str, count: int, repeats: int) -> None:
    """Measure one implementation in this process, and print each result row as a line of JSON."""
    mesh = make_mesh(jax.devices(), count)
    if mesh is None:
        raise SystemExit(f"--devices is {count}: give 2 or more")
    if way == "peer memory" and not can_use_peer_memory(
        mesh.devices.ravel().tolist(), jnp.bfloat16
    ):
        raise SystemExit("these devices have no peer memory access: use --way XLA or --way NCCL")
    for rows in ROWS:
        print(json.dumps(measure(mesh, way, rows, repeats)), flush=True)


def run_in_process(way: str, arguments: list[str]) -> list[dict]:
    """Measure one implementation in a new process, and return the result rows."""
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
    parser.add_argument(
        "--way", choices=[*WAYS], help="measure only this implementation, in this process"
    )
    args = parse_arguments(parser)
    if args.way is not None:
        run_here(args.way, args.devices, args.repeats)
        return
    options = ["--devices", str(args.devices), "--repeats", str(args.repeats)]
    rows = [row for way in WAYS for row in run_in_process(way, options)]
    for row in rows:
        if args.devices == 2 and row["way"] == "peer memory" and row["rows"] in MARKS:
            row["to_reach"] = MARKS[row["rows"]]
    print_table(rows)
    print(record("all_reduce", rows, device=f"{args.devices} x {jax.devices()[0].device_kind}"))


if __name__ == "__main__":
    main()
