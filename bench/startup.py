"""From the start of a process to its first token (`python -m bench.startup`).

    cold    an empty folder of compiled programs
    warm    the folder as the cold start left it; the median of some

Each start is a process of its own. The shapes have random weights and an engine as in the other
benchmarks; those of `UNRECORDED` are not in what ships of XLA's measurements. `--model embedded`
runs `python -m jpaged` with the model that ships inside.
Phases as the engine tells them: sizing and compiling begin before the model is loaded, and what is
told of them is how long the start still waits for them then. "other" is what is between phases.
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
    UNRECORDED,
    add_format_option,
    labelled,
)
from bench.compare import parse_arguments
from bench.records import print_table, record

EMBEDDED = "embedded"
PROMPT = "Count from 1 to 20"
TIMEOUT_S = 300  # after which a start is ended
# Seconds to the first token: vLLM 0.24 on an H200 (import and start, no weights read), to reach.
VLLM = {"qwen3-0.6b": 49, "llama-3.1-8b": 50}
TO_REACH = {"cold": 40, "warm": 10}
TO_REACH_UNRECORDED = {"cold": 45, "warm": 10}
TO_REACH_EMBEDDED = {"cold": 10, "warm": 10}
TO_REACH_ON_SEVERAL = {"cold": 60, "warm": 15}
TO_REACH_FP8 = {"cold": 45, "warm": 15}  # five more than of bfloat16

PHASES = {
    "imports": "imports",
    "starting": "device",
    "loading": "loading",
    "sizing": "sizing",
    "waiting": "compiling",  # for programs
    "warming": "warming_up",
}
"""First word of a phase as the engine tells it: column."""

SERVE = """
import json, sys, time
start = time.monotonic()
from jpaged import Engine, SamplingParams
print(f"jpaged: imports took {time.monotonic() - start:.2f} s", file=sys.stderr)
engine = Engine(**json.loads(sys.argv[1]))
prompt = list(range(1, 129))
engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
while not any(output.outputs[0].token_ids for output in engine.step()):
    pass
print("first token", flush=True)
engine.abort_all()
"""


class Kind(NamedTuple):
    """What is started: a shape, or `EMBEDDED`; in one of `FORMATS`; on so many GPUs."""

    model: str
    form: str = "bf16"
    num_devices: int = 1

    @property
    def limits(self) -> dict[str, int]:
        """Seconds to reach."""
        if self.num_devices > 1:
            return TO_REACH_ON_SEVERAL
        own = {EMBEDDED: TO_REACH_EMBEDDED, **dict.fromkeys(UNRECORDED, TO_REACH_UNRECORDED)}
        return own.get(self.model, TO_REACH if self.form == "bf16" else TO_REACH_FP8)

    @property
    def vllm(self) -> int | None:
        """Seconds of vLLM's start, where they are known."""
        return VLLM.get(self.model) if self[1:] == ("bf16", 1) else None

    @property
    def label(self) -> dict[str, Any]:
        """What its rows are known by."""
        count = {"devices": self.num_devices} if self.num_devices > 1 else {}
        return labelled({"model": self.model, **count}, self.form)


def command(kind: Kind, folder: Path, cache: Path) -> list[str]:
    """What a start runs; its files lie in `folder`, compiled programs in `cache`."""
    model = kind.model
    if model == EMBEDDED:
        return [sys.executable, "-m", "jpaged", "--compilation-cache-dir", str(cache), PROMPT]
    config = ALL_SHAPES[model]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    options |= {"compilation_cache_dir": str(cache), "verbose": True}
    options |= {"tensor_parallel_size": kind.num_devices, **FORMATS[kind.form]}
    return [sys.executable, "-c", SERVE, json.dumps({**options, **AS_VLLM})]


def start(kind: Kind, cache: Path) -> dict:
    """Start a process and wait for its first token.

    Args:
        kind: What is started.
        cache: The folder of compiled programs that it finds.

    Returns:
        `first_token_s`, seconds by phase, and `processor_s`, which the whole process took of all
        processors: over their number, what it takes at least on a machine of its own.

    Raises:
        RuntimeError: it ended before its first token.
    """
    # The driver keeps compiled kernels too; those of earlier runs would make a cold start warmer.
    environment = {**os.environ, "CUDA_CACHE_PATH": str(cache / "cuda")}
    own = str(Path(__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([own, *filter(None, [os.getenv("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as told:
        began, used = time.monotonic(), processor_seconds()
        process = subprocess.Popen(
            command(kind, Path(folder), cache),
            stdout=subprocess.PIPE,
            stderr=told,
            env=environment,
        )
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        first = process.stdout.read(1) if process.stdout is not None else b""
        seconds = time.monotonic() - began
        process.communicate()
        watchdog.cancel()
        told.seek(0)
        text = told.read()
    if not first or process.returncode:
        raise RuntimeError(f"{kind} ended with {process.returncode}:\n{text}")
    return {
        "first_token_s": seconds,
        "processor_s": processor_seconds() - used,
        **phases(text, seconds),
    }


def processor_seconds() -> float:
    """What all processes started so far, and done, took of the processors."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def phases(told: str, whole: float) -> dict[str, float]:
    """Seconds by phase, from what a process said on stderr."""
    found = dict.fromkeys(PHASES.values(), 0.0)
    for name, seconds in re.findall(r"jpaged: (\w+).* took ([\d.]+) s", told):
        if name in PHASES:
            found[PHASES[name]] += float(seconds)
    return {**found, "other": whole - sum(found.values())}


def measure(kind: Kind, repeats: int, kept: Path | None = None) -> list[dict]:
    """A cold start, and the median of `repeats` warm ones; what they compile stays in `kept`."""
    with tempfile.TemporaryDirectory() as cache:
        folder = Path(cache) if kept is None else kept / kind.model
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"--cache-dir: {folder} is not empty, so no start would be cold")
        cold = start(kind, folder)
        warm = [start(kind, folder) for _ in range(repeats)]
    medians = {name: statistics.median(run[name] for run in warm) for name in warm[0]}
    return [row("cold", kind, cold), row("warm", kind, medians)]


def row(which: str, kind: Kind, figures: dict) -> dict:
    """A start's figures with what they are to be."""
    limit, seconds = kind.limits[which], figures["first_token_s"]
    marks = {"to_reach": limit, "vllm": kind.vllm, "reached": seconds <= limit}
    own = {"first_token_s": seconds, "processors": os.cpu_count()}
    return {"start": which, **kind.label, **own, **marks, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = [*ALL_SHAPES, EMBEDDED]
    parser.add_argument("--model", choices=models, nargs="+", default=[*SHAPES])
    parser.add_argument("--repeats", type=int, default=3, help="warm starts")
    parser.add_argument("--cache-dir", type=Path, help="keep what is compiled here, by model")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs (%(default)s)")
    add_format_option(parser)
    args = parse_arguments(parser)
    kinds = [
        Kind(model, form, args.tensor_parallel_size)
        for model, form in itertools.product(args.model, args.format)
    ]
    if any(kind.model == EMBEDDED and kind[1:] != ("bf16", 1) for kind in kinds):
        parser.error("--model embedded starts the command as it is: without other options")
    if args.cache_dir is not None and len(args.format) > 1:
        parser.error("--cache-dir has a folder a model, so give one --format")
    rows = []
    for kind in kinds:
        rows += measure(kind, args.repeats, args.cache_dir)
        print_table(rows[-2:])
    by = "start", "model", "format", "devices"
    print(record("startup", rows, by=by))


if __name__ == "__main__":
    main()
