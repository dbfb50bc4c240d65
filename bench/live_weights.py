"""Measure updates of an engine's weights, and the memory that sleep returns.

`python -m bench.live_weights` creates an engine with random weights. It also creates arrays with
the names of a checkpoint, as a trainer in the same process would have. `first_ms` is the time of
the first update, which compiles. `update_ms` is the median time of later updates. `extra_GB` is the
peak of device memory during the updates, beyond the engine's and the trainer's arrays. `extra` is
(extra memory / memory of the weights). `sleep1_GB` and `sleep2_GB` are the memory that each level
of `sleep` returns. The extra memory is measurable only if the updates need more memory than the
start of the engine. If `extra_GB` is 0, lower `--kv-cache-gb`.

`--shape embedded` is a smoke test for any device.
"""

import argparse
import math
import statistics
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from bench.common import EMBEDDED, FORMATS, SHAPES, add_format_option, new_engine
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import Engine
from jpaged.models.config import ModelConfig
from jpaged.models.registry import weight_rules
from jpaged.models.weight_plan import make_abstract_model, model_parameters

GIB = 2**30


def checkpoint_arrays(config: ModelConfig, dtype: Any) -> dict[str, jax.Array]:
    """Return one array for each tensor of a checkpoint, with values that differ from zero."""
    config = replace(config, quantization=None, kv_cache_dtype=None)
    specs, arrays = model_parameters(make_abstract_model(config, dtype)), {}
    for rule in weight_rules(config).rules:
        if rule.target not in specs or rule.is_alternative:
            continue
        shape = rule.shape or specs[rule.target].shape
        axes = rule.file_axes or [(axis,) for axis in range(len(shape))]
        file_shape = [math.prod(shape[axis] for axis in group) for group in axes]
        arrays[rule.source] = jnp.full(file_shape, 0.01, dtype)
    return jax.block_until_ready(arrays)


def memory_in_use(key: str = "bytes_in_use") -> int:
    """Return the number of bytes of device memory in use.

    With the key "peak_bytes_in_use", return the maximum since the process started. Return 0 if the
    device has no memory statistics.
    """
    return (jax.local_devices()[0].memory_stats() or {}).get(key, 0)


def measure(engine: Engine, repeats: int) -> dict[str, Any]:
    """Return a result row: the times and the memory of weight updates, `sleep` and `wake_up`."""
    config = engine.model_config
    if not isinstance(config, ModelConfig):
        raise TypeError(
            "only built-in models can be measured, but the engine serves a user's JAX model: pass "
            "an engine from `new_engine`"
        )
    params = checkpoint_arrays(config, jnp.bfloat16)
    size = sum(it.nbytes for it in params.values())
    before, seconds = memory_in_use(), []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        engine.update_weights(params)
        seconds.append(time.perf_counter() - start)
    extra = max(memory_in_use("peak_bytes_in_use") - before, 0)
    row = {
        "weights_GB": size / GIB,
        "first_ms": 1e3 * seconds[0],
        "update_ms": 1e3 * statistics.median(seconds[1:]),
        "extra_GB": extra / GIB,
        "extra": extra / size,
    }
    for level in (1, 2):
        before = memory_in_use()
        engine.sleep(level)
        row[f"sleep{level}_GB"] = (before - memory_in_use()) / GIB
        start = time.perf_counter()
        if level == 2:
            engine.update_weights(params)
        engine.wake_up()
        row[f"wake{level}_ms"] = 1e3 * (time.perf_counter() - start)
    return row


def main() -> None:
    """Measure the shapes and formats that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["llama-3.1-8b"], choices=[EMBEDDED, *SHAPES])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kv-cache-gb", type=float, default=8.0)
    add_format_option(parser)
    args = parse_arguments(parser)
    rows = []
    for shape in args.shape:
        for form in args.format:
            pool = int(args.kv_cache_gb * 1e9)
            engine = new_engine(shape, kv_cache_memory_bytes=pool, **FORMATS[form])
            rows.append({"shape": shape, "format": form, **measure(engine, args.repeats)})
            del engine
    print_table(rows)
    print(record("live_weights", rows, by=("shape", "format")))


if __name__ == "__main__":
    main()
