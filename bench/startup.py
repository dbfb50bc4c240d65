"""Measure the time from the start of a process to its first token (`python -m bench.startup`).

    cold    with an empty compilation cache
    warm    with the cache of the cold start; the median of several starts

Each start is a new process. The engines have random weights and the options of the other
benchmarks. The GEMMs of the shapes in `UNRECORDED` are not in the autotuning records that ship with
jpaged. `--model embedded` runs `python -m jpaged` with the model that ships with jpaged. The models
`fused` and `plain` are those of `bench.jax_model`, in the shape of Qwen3-0.6B. They use JAX's
compilation cache.

The columns of phases come from the log of the process. Sizing and compiling run in the background
while the model loads: their columns are the time that the engine still waits for them afterwards.
"other" is the rest, such as the start of Python and the first step. It is the whole time of
`embedded`, which logs no phases here. For `fused` and `plain`, it includes the start of the device
and the creation of the weights.
"""

import argparse
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import (
    ALL_SHAPES,
    AS_VLLM,
    FORMATS,
    SHAPES,
    SPARSE,
    UNRECORDED,
    add_format_option,
    labelled,
)
from bench.compare import parse_arguments
from bench.jax_model import make_config
from bench.records import print_table, record

EMBEDDED = "embedded"
PROMPT = "Count from 1 to 20"
TIMEOUT_S = 300
# Maps a model to the seconds until vLLM 0.24 on an H200 returns the first token. The time includes
# imports and the engine start, but not the reading of weights.
VLLM = {"qwen3-0.6b": 49, "llama-3.1-8b": 50}
TO_REACH = {"cold": 40, "warm": 10}
TO_REACH_UNRECORDED = {"cold": 45, "warm": 10}
TO_REACH_EMBEDDED = {"cold": 10, "warm": 10}
TO_REACH_ON_SEVERAL = {"cold": 60, "warm": 15}
TO_REACH_FP8 = {"cold": 45, "warm": 15}
TO_REACH_SPARSE = {"cold": 60}

PHASES = {
    "imports": "imports",
    "starting": "device",
    "loading": "loading",
    "sizing": "sizing",
    "waiting": "compiling",
    "warming": "warming_up",
}
"""Maps the first word of a log line of the engine to the column of that phase in the results."""

JAX_MODELS, JAX_MODEL_SHAPE = ("fused", "plain"), "qwen3-0.6b"
POOL_BYTES = 8 * 2**30
"""Size of the KV pool of a model of `JAX_MODELS`."""

# The placeholder is replaced by a statement that imports `make_engine`.
SERVE = """
import json, sys, time
start = time.monotonic()
from jpaged import SamplingParams
%s
print(f"jpaged: imports took {time.monotonic() - start:.2f} s", file=sys.stderr)
engine = make_engine(**json.loads(sys.argv[1]))
prompt = list(range(1, 129))
engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
while not any(output.outputs[0].token_ids for output in engine.step()):
    pass
print("first token", flush=True)
engine.abort_all()
"""


class Kind(NamedTuple):
    """Setup of a process whose start is timed.

    Attributes:
        model: A key of `ALL_SHAPES`; one of `JAX_MODELS`; or `EMBEDDED` for the model that ships
            with jpaged.
        form: Data types of the weights and the KV cache, a key of `FORMATS`.
        num_devices: Number of GPUs.
    """

    model: str
    form: str = "bf16"
    num_devices: int = 1

    @property
    def limits(self) -> dict[str, int]:
        """Targets in seconds, with the keys "cold" and "warm"; empty without targets."""
        if self.model in JAX_MODELS:
            return {}
        if self.num_devices > 1:
            return TO_REACH_ON_SEVERAL
        limits = {EMBEDDED: TO_REACH_EMBEDDED, **dict.fromkeys(UNRECORDED, TO_REACH_UNRECORDED)}
        limits |= dict.fromkeys(SPARSE, TO_REACH_SPARSE)
        return limits.get(self.model, TO_REACH if self.form == "bf16" else TO_REACH_FP8)

    @property
    def vllm(self) -> int | None:
        """Seconds until vLLM returns the first token, or None if not measured."""
        return VLLM.get(self.model) if self[1:] == ("bf16", 1) else None

    @property
    def label(self) -> dict[str, Any]:
        """Columns of a result row that identify this kind of start: model, GPUs and format."""
        count = {"devices": self.num_devices} if self.num_devices > 1 else {}
        name = (
            f"{JAX_MODEL_SHAPE}, {self.model} JaxModel" if self.model in JAX_MODELS else self.model
        )
        return labelled({"model": name, **count}, self.form)


def command(kind: Kind, folder: Path, cache: Path) -> list[str]:
    """Write the `config.json` of the model to `folder`, and return the command that starts a
    process.

    `cache` is the folder where the process stores compiled programs.
    """
    model = kind.model
    if model == EMBEDDED:
        return [sys.executable, "-m", "jpaged", "--compilation-cache-dir", str(cache), PROMPT]
    shared = {"compilation_cache_dir": str(cache), "verbose": True}
    if model in JAX_MODELS:
        shared |= {"model": model, "config": make_config(JAX_MODEL_SHAPE, None)}
        shared["kv_cache_memory_bytes"] = POOL_BYTES
        code = SERVE % "from bench.jax_model import make_engine"
        return [sys.executable, "-c", code, json.dumps(shared)]
    config = ALL_SHAPES[model]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    options |= {"tensor_parallel_size": kind.num_devices, **FORMATS[kind.form]}
    code = SERVE % "from jpaged import Engine as make_engine"
    return [sys.executable, "-c", code, json.dumps({**shared, **options, **AS_VLLM})]


def start(kind: Kind, cache: Path) -> dict:
    """Start a process and wait for its first token.

    Args:
        kind: The kind of start.
        cache: The folder where the process stores compiled programs.

    Returns:
        A dict with `first_token_s`, the seconds of each phase, and `processor_s`: the CPU seconds
        of the whole process. On an idle machine with n processors, the start takes at least
        `processor_s` / n seconds.

    Raises:
        RuntimeError: the process ended before its first token.
    """
    # The NVIDIA driver caches compiled kernels too. An old cache would speed up a cold start.
    environment = {**os.environ, "CUDA_CACHE_PATH": str(cache / "cuda")}
    root = str(Path(__file__).parent.parent)
    if kind.model in JAX_MODELS:
        # The engine of a `JaxModel` does not enable JAX's compilation cache.
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache / "jax")}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.getenv("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        began, used = time.monotonic(), processor_seconds()
        process = subprocess.Popen(
            command(kind, Path(folder), cache),
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
        )
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        first = process.stdout.read(1) if process.stdout is not None else b""
        seconds = time.monotonic() - began
        process.communicate()
        watchdog.cancel()
        log.seek(0)
        text = log.read()
    if not first or process.returncode:
        raise RuntimeError(f"the process of {kind} ended with code {process.returncode}:\n{text}")
    return {
        "first_token_s": seconds,
        "processor_s": processor_seconds() - used,
        **phases(text, seconds),
    }


def processor_seconds() -> float:
    """Return the CPU seconds of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def phases(log: str, whole: float) -> dict[str, float]:
    """Return the seconds of each phase, read from the log of a process.

    The phase "other" is the rest of `whole`, the seconds until the first token.
    """
    found = dict.fromkeys(PHASES.values(), 0.0)
    for name, seconds in re.findall(r"jpaged: (\w+).* took ([\d.]+) s", log):
        if name in PHASES:
            found[PHASES[name]] += float(seconds)
    return {**found, "other": whole - sum(found.values())}


def measure(kind: Kind, repeats: int, kept: Path | None = None) -> list[dict]:
    """Return two rows: a cold start, and the median of `repeats` warm starts.

    The compilation cache is kept in the folder `kept`, or in a temporary folder if `kept` is None.
    """
    with tempfile.TemporaryDirectory() as cache:
        folder = Path(cache) if kept is None else kept / kind.model
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"--cache-dir: {folder} is not empty: a cold start needs an empty one")
        cold = start(kind, folder)
        warm = [start(kind, folder) for _ in range(repeats)]
    medians = {name: statistics.median(run[name] for run in warm) for name in warm[0]}
    return [row("cold", kind, cold), row("warm", kind, medians)]


def row(which: str, kind: Kind, figures: dict) -> dict:
    """Return a result row with the times of a "cold" or "warm" start, the target in seconds, and
    whether the start reached the target."""
    limit, seconds = kind.limits.get(which), figures["first_token_s"]
    reached = None if limit is None else seconds <= limit
    marks = {"to_reach": limit, "vllm": kind.vllm, "reached": reached}
    first = {"first_token_s": seconds, "processors": len(os.sched_getaffinity(0))}
    return {"start": which, **kind.label, **first, **marks, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = [*ALL_SHAPES, *JAX_MODELS, EMBEDDED]
    parser.add_argument("--model", choices=models, nargs="+", default=[*SHAPES])
    parser.add_argument("--repeats", type=int, default=3, help="number of warm starts")
    parser.add_argument("--cache-dir", type=Path, help="keep the compiled programs in subfolders")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs (%(default)s)")
    add_format_option(parser)
    args = parse_arguments(parser)
    kinds = [
        Kind(model, form, args.tensor_parallel_size)
        for model, form in itertools.product(args.model, args.format)
    ]
    for kind in kinds:
        if kind.model in (EMBEDDED, *JAX_MODELS) and kind[1:] != ("bf16", 1):
            parser.error(f"--model {kind.model}: omit --format and --tensor-parallel-size")
    if args.cache_dir is not None and len(args.format) > 1:
        parser.error("--cache-dir has one folder per model: pass only one --format")
    rows = []
    for kind in kinds:
        rows += measure(kind, args.repeats, args.cache_dir)
        print_table(rows[-2:])
    by = "start", "model", "format", "devices"
    print(record("startup", rows, by=by))


if __name__ == "__main__":
    main()
