"""Lower, compile and time the programs of a case for `tools.tune`."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from pallas_kernels import Backend, tuning
from tools.tune_cases import Case, Op

CACHE_BYTES = 256 << 20  # `CACHE_BYTES` is several times the L2 cache of any GPU.
MIN_CALLS, MAX_CALLS = 4, 16
BLOCK_SECONDS = 0.03  # The launches between two synchronizations take `BLOCK_SECONDS` seconds.

Override = Mapping[str, int]


@contextmanager
def using(op: Op, override: Override) -> Iterator[list]:
    """Until the context ends, change the launch parameters of the op as if its tuned table
    contained `override`.

    The override applies to the whole process, so only one candidate can be traced at a time.

    Yields:
        A list. Each time launch parameters are chosen for the op, they are appended to the list.
    """
    original, chosen = tuning.apply_tuned_config, []

    def apply_tuned_config(name, head_size, itemsize, device_kind, config):
        if (name, head_size, itemsize) != (op.name, op.head_size, op.itemsize):
            return original(name, head_size, itemsize, device_kind, config)
        chosen.append(dataclasses.replace(config, **override))
        return chosen[-1]

    tuning.apply_tuned_config = apply_tuned_config
    try:
        yield chosen
    finally:
        tuning.apply_tuned_config = original


def shapes_of(case: Case) -> Any:
    """Return the shapes of the result of `case.make`, without allocating arrays."""
    return jax.eval_shape(lambda: case.make(0))


def num_calls(case: Case) -> int:
    """Return the number of calls of `case.run` in a program that is timed.

    Each call reads and writes different arrays. There are enough calls that these arrays exceed the
    device's cache, and that the calls take longer than the launch of the program.
    """
    leaves = jax.tree.leaves(shapes_of(case))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return max(MIN_CALLS, min(MAX_CALLS, -(-CACHE_BYTES // size)))


def lower_loop(case: Case, backend: Backend) -> Lowered:
    """Lower a program that calls `case.run` several times, to measure the time of a call.

    The program takes (states, inputs) and returns (states, results); the states are donated. Each
    call has different operands, because XLA would merge calls with equal operands.
    """
    state, arguments = shapes_of(case)
    count = num_calls(case)

    # Because of the inner `jit`, JAX traces and lowers the function once for all calls. XLA inlines
    # the calls.
    @jax.jit
    def run(state, arguments):
        return case.run(state, *arguments, backend=backend)

    def loop(states, inputs):
        pairs = [run(*pair) for pair in zip(states, inputs, strict=True)]
        return [state for state, _ in pairs], [result for _, result in pairs]

    return jax.jit(loop, donate_argnums=0).lower([state] * count, [arguments] * count)


def lower_call(case: Case, backend: Backend) -> Lowered:
    """Lower one call of `case.run` without donation, to check the results."""
    state, arguments = shapes_of(case)

    def call(state, *arguments):
        return case.run(state, *arguments, backend=backend)

    return jax.jit(call).lower(state, *arguments)


def compile_all(
    lowered: Mapping[str, Lowered], num_threads: int
) -> tuple[dict[str, Compiled], dict[str, Exception]]:
    """Compile programs on several threads, which works because XLA releases Python's GIL.

    Returns:
        The compiled programs, and the exceptions of the programs that failed to compile. Both have
        the keys of `lowered`.
    """

    def attempt(one: Lowered) -> Compiled | Exception:
        try:
            return one.compile()
        # The program may need too much shared memory, or Triton may fail.
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_threads) as pool:
        results = dict(zip(lowered, pool.map(attempt, lowered.values()), strict=True))
    refused = {key: given for key, given in results.items() if isinstance(given, Exception)}
    compiled = {key: given for key, given in results.items() if not isinstance(given, Exception)}
    return compiled, refused


@dataclasses.dataclass
class Inputs:
    """Inputs of the timed programs of a benchmark case: a state and arguments for each call.

    A state contains the arrays that the op updates, such as the KV pool. A program donates the
    states and returns new states, which replace the donated ones.
    """

    states: list
    arguments: list

    @classmethod
    def of(cls, case: Case) -> "Inputs":
        made = [case.make(seed) for seed in range(num_calls(case))]
        return cls([state for state, _ in made], [arguments for _, arguments in made])

    def run(self, program: Callable, launches: int) -> float:
        """Launch the program `launches` times, then wait; return the seconds per launch."""
        start, results = time.perf_counter(), None
        for _ in range(launches):
            self.states, results = program(self.states, self.arguments)
        jax.block_until_ready((self.states, results))
        return (time.perf_counter() - start) / launches


def seconds_a_call(program: Callable, inputs: Inputs, repeats: int = 5) -> float:
    """Return the median time in seconds of one call of the op in a program from `lower_loop`."""
    inputs.run(program, 1)
    launches = max(1, round(BLOCK_SECONDS / inputs.run(program, 3)))
    taken = [inputs.run(program, launches) for _ in range(repeats)]
    return statistics.median(taken) / len(inputs.states)
