"""Measure the memory that block sharing saves: the paper's figure 15.

    python -m bench.memory_savings --engine | --simulate

Requests have Alpaca-like and ShareGPT-like lengths, and 2, 4 or 6 samples or beams each. The pool
is large enough for all running requests. After each step `memory_report()` counts the physical
blocks, and the logical blocks that would be needed without sharing. Both counts are summed over all
steps, and the saving is 1 - physical / logical. `mean_of_steps_%` weights all steps equally. Prefix
caching is off, so that only the sequences of a request share blocks, as in the paper.

Lengths are log-normal (sigma 1, seeded, at most half of `--max-model-len`). The means are the
paper's: 19 prompt and 58 output tokens, and 161 and 338. EOS is ignored. The samples of a
request share all of the prompt except its last token, whatever the model. So the last, partial
block is copied for each sample immediately. The blocks that beams share depend on the model:

    --engine    real log-probabilities: the model that ships with jpaged, with prompts from
                ARCHITECTURE.md, or with --shape a model of that shape with random weights
    --simulate  the scheduler alone, with synthetic log-probabilities (`bench.synthetic_beams`)
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common import AS_VLLM, SHAPES, make_engine, random_prompts
from bench.compare import parse_arguments
from bench.records import print_table, record
from bench.synthetic_beams import DESCRIPTION, VOCAB_SIZE, serve
from jpaged import Engine, SamplingParams
from jpaged.observe.pool_report import MemoryReport

BLOCK_SIZE = 16
WIDTHS = (2, 4, 6)


@dataclass(frozen=True)
class Workload:
    """Requests with given mean lengths of prompts and outputs.

    `paper` maps a decoding method to the paper's savings in percent: a range (lowest, highest), or
    a number for each width in `WIDTHS`.
    """

    name: str
    mean_prompt: float
    mean_output: float
    num_requests: int
    paper: dict[str, tuple[float, ...]]

    def lengths(self, scale: float, longest: int) -> tuple[list[int], list[int]]:
        """Return the prompt lengths and the output lengths of all requests."""
        count, rng = max(round(self.num_requests * scale), 1), np.random.RandomState(0)
        prompts, outputs = (
            draw_lengths(rng, mean, count, longest) for mean in (self.mean_prompt, self.mean_output)
        )
        return prompts, outputs

    def saved_by_paper(self, decoding: str, width: int) -> str:
        figures = self.paper[decoding]
        if len(figures) == len(WIDTHS):
            return f"{figures[WIDTHS.index(width)]} %"
        return f"{figures[0]} to {figures[1]} %"


PARALLEL, BEAM = "parallel", "beam"
WORKLOADS = (
    Workload("alpaca", 19, 58, 256, {PARALLEL: (6.1, 8.5, 9.8), BEAM: (37.6, 53.1, 55.2)}),
    Workload("sharegpt", 161, 338, 128, {PARALLEL: (16.2, 30.5), BEAM: (44.3, 66.3)}),
)


def draw_lengths(rng: np.random.RandomState, mean: float, count: int, longest: int) -> list[int]:
    """Return `count` log-normal lengths with the mean `mean`, each from 1 to `longest`."""
    drawn, scale = rng.lognormal(0.0, 1.0, count), mean
    for _ in range(50):
        lengths = np.clip(np.rint(drawn * scale), 1, longest).astype(int)
        scale *= mean / lengths.mean()
    return lengths.tolist()


class Savings:
    """Totals over all steps: the number of physical blocks, and the number of logical blocks, which
    would be needed without sharing."""

    def __init__(self):
        self.num_logical = self.num_physical = self.num_steps = 0
        self._sum_of_shares = 0.0

    def note(self, report: MemoryReport) -> None:
        """Add a step's memory report. Ignore the report if all block tables are empty."""
        if report.num_logical_blocks:
            self.num_steps += 1
            self.num_logical += report.num_logical_blocks
            self.num_physical += report.num_physical_blocks
            self._sum_of_shares += report.shared_savings

    @property
    def percent(self) -> float:
        return 100 * (1 - self.num_physical / max(self.num_logical, 1))

    @property
    def mean_of_steps(self) -> float:
        return 100 * self._sum_of_shares / max(self.num_steps, 1)


def params_of(decoding: str, width: int, max_tokens: int) -> SamplingParams:
    common = {"n": width, "max_tokens": max_tokens, "ignore_eos": True}
    if decoding == BEAM:
        return SamplingParams(beam_width=width, temperature=0.0, **common)
    return SamplingParams(temperature=1.0, seed=max_tokens, **common)


def prompts_for(engine: Engine, lengths: list[int]) -> list[list[int]]:
    """Return prompts of the given lengths, cut from ARCHITECTURE.md.

    For a model without a tokenizer, the prompts are random tokens.
    """
    if engine.tokenizer is None:
        return random_prompts(lengths, engine.vocab_size)
    text = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tokens, rng = engine.tokenizer.encode(text), np.random.RandomState(0)
    starts = [rng.randint(0, len(tokens) - length) for length in lengths]
    return [tokens[at : at + length] for at, length in zip(starts, lengths, strict=True)]


def run_engine(
    engine: Engine, decoding: str, width: int, prompts: list[int], outputs: list[int]
) -> Iterator[MemoryReport]:
    """Serve the requests through an engine; yield the engine's memory report after each step."""
    for prompt, max_tokens in zip(prompts_for(engine, prompts), outputs, strict=True):
        engine.add_request(prompt, params_of(decoding, width, max_tokens))
    while engine.has_unfinished_requests:
        engine.step()
        yield engine.memory_report()


def run_simulated(
    decoding: str, width: int, prompts: list[int], outputs: list[int], max_model_len: int
) -> Iterator[MemoryReport]:
    """Serve the requests by the scheduler without a model; yield a memory report per step."""
    num_seqs = int(AS_VLLM["max_num_seqs"])
    return serve(
        list(zip(random_prompts(prompts, VOCAB_SIZE), outputs, strict=True)),
        width,
        is_search=decoding == BEAM,
        max_num_seqs=num_seqs,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
    )


def measure(
    engine: Engine | None, workload: Workload, decoding: str, width: int, args: argparse.Namespace
) -> dict:
    """Serve a workload, and return a result row with the blocks that sharing saves.

    If `engine` is None, run the scheduler without a model.
    """
    longest = args.max_model_len // 2
    prompts, outputs = workload.lengths(args.scale, longest)
    start, savings = time.perf_counter(), Savings()
    if engine is None:
        reports = run_simulated(decoding, width, prompts, outputs, args.max_model_len)
    else:
        reports = run_engine(engine, decoding, width, prompts, outputs)
    for report in reports:
        savings.note(report)
    return {
        "lengths": workload.name,
        "decoding": decoding,
        "width": width,
        "saved_%": savings.percent,
        "paper": workload.saved_by_paper(decoding, width),
        "mean_of_steps_%": savings.mean_of_steps,
        "requests": len(prompts),
        "mean_prompt": float(np.mean(prompts)),
        "mean_output": float(np.mean(outputs)),
        "steps": savings.num_steps,
        "seconds": time.perf_counter() - start,
    }


def engine_for(args: argparse.Namespace) -> Engine:
    """Create an engine with the model that ships with jpaged. If `--shape` is given, use a model of
    that shape with random weights."""
    if args.shape is not None:
        return make_engine(args.shape, block_size=BLOCK_SIZE)
    options = {"enable_prefix_caching": False, "block_size": BLOCK_SIZE}
    return Engine(max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs, **options)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--engine", action="store_true", help="use a model's log-probabilities")
    how.add_argument("--simulate", action="store_true", help="use synthetic log-probabilities")
    parser.add_argument("--shape", choices=[*SHAPES], help="with --engine: random weights")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the requests to run")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="default 2048, bundled model 1024"
    )
    parser.add_argument("--max-num-seqs", type=int, default=64, help="with the bundled model")
    parser.add_argument("--lengths", choices=[w.name for w in WORKLOADS], nargs="+")
    parser.add_argument("--decoding", choices=[PARALLEL, BEAM], nargs="+", default=[PARALLEL, BEAM])
    parser.add_argument("--width", type=int, choices=WIDTHS, nargs="+", default=[*WIDTHS])
    return parser


def main() -> None:
    args = parse_arguments(build_parser())
    if args.max_model_len is None:
        args.max_model_len = 1024 if args.engine and args.shape is None else 2048
    engine = engine_for(args) if args.engine else None
    rows = []
    for workload in WORKLOADS:
        for decoding in args.decoding if workload.name in (args.lengths or workload.name) else ():
            for width in args.width:
                rows.append(measure(engine, workload, decoding, width, args))
                print(rows[-1], flush=True)
    print_table(rows)
    name, model = "memory_savings", args.shape or "embedded"
    if args.simulate:
        name, model = "memory_savings_simulated", DESCRIPTION
    more = {"scale": args.scale, "block_size": BLOCK_SIZE, "max_model_len": args.max_model_len}
    print(record(name, rows, simulated=args.simulate, model=model, **more))


if __name__ == "__main__":
    main()
