"""Measure the cost of structured output, and validate the answers (`python -m bench.structured`).

    masks       time from a step's tokens to the masks of the next step. The rows have answers to 50
                published schemas, to a schema of 20 bounded fields, or to a schema of unbounded
                strings and arrays
    speed       tokens per second of all rows and per row. No row, half of the rows or all rows have
                a schema: the one of 20 fields, or the unbounded one. `free_of_before` is the speed
                of the rows without a schema, divided by their speed while no row has one. `single`
                has neither schemas nor bursts (a step with a schema is never part of a burst)
    parts       host milliseconds per step, by part, of the same cases
    shares      answers at temperature 1 to the published schemas. `stop`: answers that end by
                themselves. `valid`: those that an independent validator (`jsonschema`) accepts.
                `length`: answers that reached the token limit. `beginnings`: those that could
                still become valid with more tokens

The model has random weights and a tokenizer of synthetic words (`--shape`), or is the model that
ships with jpaged. All rows are sampled with seeds at temperature 1. `--quick` is for CPUs: fewer
rows and answers.

The parts of a step on the engine's thread:

    schedule      scheduling
    layers        launching the model
    read          waiting for the sampled tokens
    await_taken   waiting until the mask worker has received the tokens
    update        updating the sequences
    masks         waiting for the masks, and copying them
    sampling      uploading the masks and launching the sampler
    start         starting the thread that sends the tokens to the mask worker
    other         everything else

Concurrent with these: `thread_tokens`, the wait of the sending thread for the tokens;
`process_accept` and `process_masks`, the mask worker's time to accept the tokens and to compute
masks. `sat_out` is the number of rows per step that were postponed because their masks were late.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from bench.common import AS_VLLM, SHAPES, random_prompts
from bench.compare import parse_arguments
from bench.null_device import Clock
from bench.records import print_table, record
from bench.synthetic_tokenizer import write_tokenizer
from jpaged import Engine, SamplingParams, StructuredOutputs
from jpaged.core.plan import StepPlan
from jpaged.core.scheduler import Scheduler
from jpaged.outputs import CompletionOutput
from jpaged.runtime.results import StepHandle
from jpaged.structured_outputs.compiler import GrammarCompiler
from jpaged.structured_outputs.mask_client import Answer, MaskWorkerClient
from jpaged.structured_outputs.matcher import GrammarError

_END = 1000
"""The EOS token id for models with random weights: the id of one of the synthetic words."""

_MASK_STEPS = 96
"""Maximum number of timed steps of the table `masks`.

Most of the time is not measured: the script chooses a random token for each row.
"""

_COUNTED = ("stop", "valid", "length", "beginnings", "error")

FIELDS: dict[str, Any] = {
    "type": "object",
    "properties": {
        **{f"name_{i}": {"type": "string", "maxLength": 16} for i in range(8)},
        **{f"count_{i}": {"type": "integer", "minimum": 0, "maximum": 9999} for i in range(5)},
        **{f"kind_{i}": {"enum": ["small", "large", "other"]} for i in range(3)},
        **{f"is_{i}": {"type": "boolean"} for i in range(2)},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "since": {"type": "string", "format": "date"},
    },
    "additionalProperties": False,
}
FIELDS["required"] = [*FIELDS["properties"]]
_TEXT = {"type": "string"}
_NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"title": _TEXT, "text": _TEXT, "tags": {"type": "array", "items": _TEXT}},
    "required": ["title", "text", "tags"],
    "additionalProperties": False,
}
UNBOUNDED: dict[str, Any] = {
    "type": "object",
    "properties": {**_NOTE["properties"], "notes": {"type": "array", "items": _NOTE}},
    "required": ["title", "text", "tags", "notes"],
    "additionalProperties": False,
}
"""A schema with strings and arrays of any length."""


def _endless(schema: dict[str, Any]) -> StructuredOutputs:
    """Return a structured-output spec: an array with more objects than an answer can contain."""
    return StructuredOutputs(json={"type": "array", "items": schema, "minItems": 10_000})


FORMS = {"fields": _endless(FIELDS), "unbounded": _endless(UNBOUNDED)}
"""Maps the name of a schema to the structured-output spec of rows with that schema."""


class Size(NamedTuple):
    """Amount of work of the benchmark.

    Attributes:
        rows: Number of batch rows.
        answers: Number of answers that are generated and validated for the table `shares`.
        max_tokens: Maximum number of tokens of a validated answer.
        tokens: Number of tokens per row in the other tables.
        repeats: Number of repetitions.
    """

    rows: int = 64
    answers: int = 2000
    max_tokens: int = 1024
    tokens: int = 256
    repeats: int = 3


QUICK = Size(rows=8, answers=100, max_tokens=600, tokens=64, repeats=1)


def published() -> dict[str, Any]:
    """Return the published schemas by name; `tools.published_schemas` lists their sources."""
    entries = json.loads(Path(__file__).with_name("published_schemas.json").read_text("utf-8"))
    return {name: entry["schema"] for name, entry in entries.items()}


def shares(engine: Engine, size: Size) -> dict[str, Any]:
    """Generate answers to the published schemas, and return the row of the table `shares`.

    The row counts complete answers (`stop`), and complete answers that match the schema (`valid`).
    It also counts answers that reached `size.max_tokens` (`length`), and how many of these could
    still become valid with more tokens (`beginnings`).
    """
    forms = {name: StructuredOutputs(json=schema) for name, schema in published().items()}
    asked = [[*forms][i % len(forms)] for i in range(size.answers)]
    params = [
        SamplingParams(seed=i, max_tokens=size.max_tokens, structured_outputs=forms[name])
        for i, name in enumerate(asked)
    ]
    prompts = [f"Answer number {i}: " for i in range(len(asked))]
    start = time.perf_counter()
    outputs = [it.outputs[0] for it in engine.generate(prompts, params, use_tqdm=False)]
    seconds = time.perf_counter() - start
    counts: dict[str, int] = dict.fromkeys(_COUNTED, 0)
    validate, begins = _validators(), partial(_begins, _grammars(engine))
    for name, output in zip(asked, outputs, strict=True):
        counts[str(output.finish_reason)] += 1
        counts["valid"] += output.finish_reason == "stop" and validate(name, output.text)
        counts["beginnings"] += output.finish_reason == "length" and begins(forms[name], output)
    tokens = sum(len(it.token_ids) for it in outputs)
    return {"answers": len(asked), **counts, "ended": counts["stop"] / len(asked)} | {
        "tokens_an_answer": tokens / len(asked),
        "tokens_per_s": tokens / seconds,
    }


def _validators() -> Any:
    """Return a function (name, text) that returns whether the text is valid JSON for the published
    schema with this name."""
    from jsonschema import Draft202012Validator

    made = {
        name: Draft202012Validator(it, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for name, it in published().items()
    }

    def validate(name: str, text: str) -> bool:
        try:
            return made[name].is_valid(json.loads(text))
        except ValueError:
            return False

    return validate


def _grammars(engine: Engine) -> GrammarCompiler:
    if engine.tokenizer is None:
        raise RuntimeError("the engine has no tokenizer")
    return GrammarCompiler(engine.tokenizer, engine.vocab_size, frozenset({_end_of(engine)}))


def _end_of(engine: Engine) -> int:
    own = None if engine.tokenizer is None else engine.tokenizer.eos_token_id
    return _END if own is None else own


def _begins(grammars: GrammarCompiler, form: StructuredOutputs, output: CompletionOutput) -> bool:
    """Return whether a valid answer can start with the tokens of `output`."""
    matcher = grammars.compile(form).matcher(frozenset())
    try:
        for token in output.token_ids:
            matcher.accept(token)
    except GrammarError:
        return False
    return True


def masks(engine: Engine, size: Size) -> list[dict[str, Any]]:
    """Return the rows of the table `masks`: the times until grammar masks are ready, and the times
    to compile the grammars.

    The first pass (`first_..._ms`) creates grammar states, which the second pass (`later_..._ms`)
    reuses.
    """
    forms = [StructuredOutputs(json=it) for it in published().values()]
    named = {"published": forms, **{name: [form] for name, form in FORMS.items()}}
    return [_mask_row(engine, size, *each) for each in named.items()]


def _mask_row(
    engine: Engine, size: Size, name: str, forms: Sequence[StructuredOutputs]
) -> dict[str, Any]:
    ending = frozenset({_end_of(engine)})
    client = MaskWorkerClient(cast(Path, engine.folder), engine.vocab_size, ending)
    # this starts the mask worker process
    client.submit(StructuredOutputs(choice=["a"]), ending).check()
    start = time.perf_counter()
    for form in forms:
        client.submit(form, ending).check()
    compiling = time.perf_counter() - start
    times = [_mask_times(client, forms, ending, size, seed) for seed in (0, 1)]
    row: dict[str, Any] = {"schemas": name, "rows": size.rows}
    row["compile_ms"] = 1e3 * compiling / len(forms)
    for when, found in zip(("first", "later"), times, strict=True):
        row |= {f"{when}_{q}_ms": 1e3 * float(np.percentile(found, q)) for q in (50, 99, 100)}
    return row


def _mask_times(
    client: MaskWorkerClient,
    forms: Sequence[StructuredOutputs],
    ending: frozenset[int],
    size: Size,
    seed: int,
) -> list[float]:
    """Return the seconds until the masks are ready, for each step of a batch of random answers.

    Each token is drawn uniformly from the tokens that the mask allows.
    """
    rng, made = np.random.default_rng(seed), 0
    rows: list[Answer] = []
    times = []
    for _ in range(min(size.tokens, _MASK_STEPS)):
        while len(rows) < size.rows:
            constraint = client.submit(forms[made % len(forms)], ending)
            constraint.check()
            rows += constraint.answers
            made += 1
        items = [(it, i) for i, it in enumerate(rows)]
        bits, ended, _ = client.gather_masks(items, size.rows)
        errors = [error for _, error in ended if error is not None]
        if errors:
            raise errors[0]
        if ended:
            # The mask worker may report the end of an answer late, with the masks of the next step.
            over = {i for i, _ in ended}
            rows = [it for it, i in items if i not in over]
            continue
        allowed = (np.unpackbits(row.view(np.uint8), bitorder="little") for row in bits)
        last = np.array([rng.choice(np.flatnonzero(it)) for it in allowed], np.int32)
        start = time.perf_counter()
        client.request_masks((), partial(np.copy, last), send_now=True)
        over = client.await_tokens_received()
        going_on = [item for item in items if item[0] not in over]
        client.gather_masks(going_on, size.rows)
        times.append(time.perf_counter() - start)
        rows = [it for it, i in going_on if last[i] not in ending]
    return times


class Speeds(NamedTuple):
    """Tokens per second of a run: of all rows together, and of each row after its first token."""

    total: float
    of_rows: np.ndarray


class Case(NamedTuple):
    """A batch whose first `num_constrained` rows have the structured-output spec `form`."""

    num_constrained: int
    form: StructuredOutputs | None = None


def run(engine: Engine, size: Size, case: Case, seed: int) -> Speeds:
    """Generate `size.tokens` tokens in each batch row, and return the speeds.

    The structured-output spec `case.form` constrains the first `case.num_constrained` rows.
    """
    prompts = random_prompts([16] * size.rows, engine.vocab_size, 0)
    params = [
        SamplingParams(
            seed=seed * size.rows + i,
            max_tokens=size.tokens,
            ignore_eos=True,
            structured_outputs=case.form if i < case.num_constrained else None,
        )
        for i in range(size.rows)
    ]
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    counts = {len(it.outputs[0].token_ids) for it in outputs}
    if counts != {size.tokens}:
        raise RuntimeError(f"rows have {counts} tokens, not {size.tokens}")
    times = [it.metrics for it in outputs if it.metrics is not None]
    own = [(it.finished_time or 0.0) - (it.first_token_time or 0.0) for it in times]
    return Speeds(size.rows * size.tokens / seconds, (size.tokens - 1) / np.array(own))


def _cases(size: Size) -> dict[str, Case]:
    """Return the cases of the tables `speed` and `parts` by name."""
    cases = {"unconstrained": Case(0), "single": Case(0)}
    for prefix, form in (("", FORMS["fields"]), ("unbounded ", FORMS["unbounded"])):
        cases[f"{prefix}beside"] = Case(size.rows // 2, form)
        cases[f"{prefix}constrained"] = Case(size.rows, form)
    return cases


@contextmanager
def _as_case(engine: Engine, case: str) -> Iterator[None]:
    """Disable bursts (several decode steps in one launch) inside the `with` block if the case is
    `single`."""
    runner = engine._runner
    burst_steps = runner.burst_steps
    if case == "single":
        runner.burst_steps = 1
    try:
        yield
    finally:
        runner.burst_steps = burst_steps


def speeds(engine: Engine, size: Size) -> list[dict[str, Any]]:
    """Return the rows of the table `speed`: median tokens per second of each case."""
    cases, half = {**_cases(size), "unconstrained again": Case(0)}, size.rows // 2
    rows: list[dict[str, Any]] = []
    before: tuple[float, float] | None = None
    for name, case in cases.items():
        count = case.num_constrained
        with _as_case(engine, name):
            found = [run(engine, size, case, seed) for seed in range(size.repeats + 1)][1:]
        totals = [it.total for it in found]
        total = float(np.median(totals))
        free = float(np.median([np.mean(it.of_rows[half:]) for it in found]))
        before = before or (total, free)
        formed = [np.mean(it.of_rows[:count]) for it in found] if count else []
        row: dict[str, Any] = {"case": name, "tokens_per_s": total}
        row |= {"slowest": min(totals), "fastest": max(totals), "of_before": total / before[0]}
        if count < size.rows:
            row |= {"free_row_per_s": free, "free_of_before": free / before[1]}
        else:
            row |= {"free_row_per_s": None, "free_of_before": None}
        own = float(np.median(formed)) if count else None
        row |= {"formed_row_per_s": own, "formed_of_before": own and own / before[1]}
        rows.append(row)
    return rows


PARTS = (
    "schedule",
    "layers",
    "read",
    "await_taken",
    "update",
    "masks",
    "sampling",
    "start",
    "other",
)
_ELSEWHERE = ("thread_tokens", "process_accept", "process_masks")


def parts(engine: Engine, size: Size) -> list[dict[str, Any]]:
    """Return the rows of the table `parts`: milliseconds of each part of a step on the host."""
    found = []
    for name, case in _cases(size).items():
        with _as_case(engine, name):
            run(engine, size, case, 0)
            found.append({"case": name, **_parts_of(engine, partial(run, engine, size, case, 1))})
    return found


def _parts_of(engine: Engine, work: Callable[[], object]) -> dict[str, Any]:
    loop, runner, clock = engine._loop, engine._runner, Clock()
    maker: Any = engine._preprocessor.mask_client
    scheduler, num_left = loop.scheduler, 0

    def postpone_rows(plan: StepPlan, rows: Iterable[int]) -> StepPlan:
        nonlocal num_left
        places = list(rows)
        num_left += len(places)
        return Scheduler.postpone_rows(scheduler, plan, places)

    start_masks = clock.timed("start", maker.request_masks)

    def request_masks(left: Any, tokens: Callable[[], Any], *, send_now: bool) -> None:
        start_masks(left, clock.timed("thread_tokens", tokens), send_now=send_now)

    timed = [
        (scheduler, "schedule", "schedule"),
        (runner, "launch_layers", "layers"),
        (runner, "launch_burst", "layers"),
        (maker, "await_tokens_received", "await_taken"),
        (scheduler, "update", "update"),
        (maker, "gather_masks", "masks"),
        (runner, "launch_sampling", "sampling"),
        (loop, "advance", "other"),
    ]
    read = StepHandle.read
    try:
        for owner, name, part in timed:
            setattr(owner, name, clock.timed(part, getattr(owner, name)))
        maker.request_masks, scheduler.postpone_rows = request_masks, postpone_rows
        StepHandle.read = clock.timed("read", read)
        spent = maker.worker_time_ns
        before, began = engine.stats().num_steps, time.perf_counter()
        work()
        seconds, num_steps = time.perf_counter() - began, engine.stats().num_steps - before
    finally:
        StepHandle.read = read
        for owner, name, _ in timed:
            vars(owner).pop(name, None)
        del maker.request_masks, scheduler.postpone_rows
    row: dict[str, Any] = {"steps": num_steps, "ms_a_step": 1e3 * seconds / num_steps}
    spent = 1e-9 * (maker.worker_time_ns - spent)
    clock.parts |= dict(zip(_ELSEWHERE[1:], spent.tolist(), strict=True))
    row |= {part: 1e3 * clock.parts[part] / num_steps for part in (*PARTS, *_ELSEWHERE)}
    return row | {"sat_out": num_left / num_steps}


@contextmanager
def _folder(shape: str | None) -> Iterator[Path | None]:
    """Yield a folder with a tokenizer and the `config.json` of `SHAPES[shape]`.

    If `shape` is None, yield None: the model that ships with jpaged needs no folder.
    """
    if shape is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as name:
        folder, fields = Path(name), {**SHAPES[shape], "eos_token_id": _END}
        write_tokenizer(folder, fields["vocab_size"])
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        yield folder


def _options(shape: str | None, size: Size, steps: int | None) -> Mapping[str, Any]:
    own: dict[str, Any] = {} if steps is None else {"num_scheduler_steps": steps}
    if shape is None:
        return {"max_num_seqs": size.rows, **own}
    most = max(size.max_tokens, size.tokens) + 64
    seqs = {"max_num_seqs": size.rows, "max_model_len": most}
    return {**AS_VLLM, "load_format": "dummy", **seqs, **own}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES], help="random weights (the bundled model)")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rows, answers and tokens, for CPUs"
    )
    parser.add_argument(
        "--table", nargs="+", choices=[*TABLES], default=[*TABLES], help="tables to measure (all)"
    )
    parser.add_argument(
        "--answers", type=int, help=f"answers of the table shares ({Size().answers})"
    )
    parser.add_argument(
        "--num-scheduler-steps", type=int, help="maximum steps per burst; 1 disables bursts"
    )
    args = parse_arguments(parser)
    size = QUICK if args.quick else Size()
    size = size if args.answers is None else size._replace(answers=args.answers)
    if "shares" in args.table:
        _validators()  # Raise an error before the measurements if a package is missing.
    rows = []
    with _folder(args.shape) as folder:
        engine = Engine(folder, **_options(args.shape, size, args.num_scheduler_steps))
        for name in args.table:
            found = TABLES[name](engine, size)
            print(name)
            print_table(found)
            sys.stdout.flush()
            rows += [{"table": name, **row} for row in found]
    # The argument `by` keeps the recorded rows of tables that this run does not measure.
    by = ("table", "case", "schemas")
    model = args.shape or "embedded"
    print(record("structured", rows, by=by, model=model, size=size._asdict()))


TABLES: Mapping[str, Callable[[Engine, Size], list[dict[str, Any]]]] = {
    "masks": masks,
    "speed": speeds,
    "parts": parts,
    "shares": lambda engine, size: [shares(engine, size)],
}

if __name__ == "__main__":
    main()
