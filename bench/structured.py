"""What answers in a form cost, and whether they obey (`python -m bench.structured`).

    shares      answers at temperature 1 over 50 published schemas: how many end by themselves, how
                many of these an independent validator (`jsonschema`) takes, how many of the others
                are the beginning of an answer
    masks       time to make a step's masks, with answers to these schemas in all rows
    constrained tokens a second with a schema of 20 fields in every row, and without
    beside      tokens a second of rows without a form while the other half have one, and while
                none has

Random weights with a tokenizer of made-up words (`--shape`), or the embedded model. All rows are
sampled with seeds, at temperature 1. `--quick` is for CPUs: fewer rows and answers.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import AS_VLLM, SHAPES, random_prompts
from bench.compare import parse_arguments
from bench.records import print_table, record
from bench.synthetic_tokenizer import write_tokenizer
from jpaged import Engine, SamplingParams, StructuredOutputs
from jpaged.outputs import CompletionOutput
from jpaged.text.grammar import Grammar, GrammarError, Grammars, Matcher

_END = 1000
"""The token that ends answers of random weights: one of the made-up words."""

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
ENDLESS = StructuredOutputs(json={"type": "array", "items": FIELDS, "minItems": 10_000})
"""Objects of 20 fields, more of them than any answer here has room for."""


class Size(NamedTuple):
    """How much is measured."""

    rows: int = 64
    answers: int = 2000
    max_tokens: int = 1024
    tokens: int = 256
    repeats: int = 3


QUICK = Size(rows=8, answers=100, max_tokens=600, tokens=64, repeats=1)


def published() -> dict[str, Any]:
    """The published schemas by name; `tools.published_schemas` says where they are from."""
    entries = json.loads(Path(__file__).with_name("published_schemas.json").read_text("utf-8"))
    return {name: entry["schema"] for name, entry in entries.items()}


def shares(engine: Engine, size: Size) -> dict[str, Any]:
    """How many answers end, are valid, or begin one that is."""
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
    """Tells whether a text obeys a schema."""
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


def _grammars(engine: Engine) -> Grammars:
    if engine.tokenizer is None:
        raise RuntimeError("the engine has no tokenizer")
    return Grammars(engine.tokenizer, engine.vocab_size, frozenset({_end_of(engine)}))


def _end_of(engine: Engine) -> int:
    own = None if engine.tokenizer is None else engine.tokenizer.eos_token_id
    return _END if own is None else own


def _begins(grammars: Grammars, form: StructuredOutputs, output: CompletionOutput) -> bool:
    """Whether an answer that was cut is the beginning of one that obeys."""
    matcher = grammars.compile(form).matcher(frozenset())
    try:
        for token in output.token_ids:
            matcher.accept(token)
    except GrammarError:
        return False
    return True


def masks(engine: Engine, size: Size) -> dict[str, Any]:
    """Times of the masks of a step, at first (states are made) and later, and of the compiling."""
    grammars, ending = _grammars(engine), frozenset({_end_of(engine)})
    grammars.prepare()
    start = time.perf_counter()
    compiled = [grammars.compile(StructuredOutputs(json=it)) for it in published().values()]
    compiling = time.perf_counter() - start
    times = [_mask_times(grammars, compiled, ending, size, seed) for seed in (0, 1)]
    row: dict[str, Any] = {"rows": size.rows, "compile_ms": 1e3 * compiling / len(compiled)}
    for name, found in zip(("first", "later"), times, strict=True):
        row |= {f"{name}_{q}_ms": 1e3 * float(np.percentile(found, q)) for q in (50, 99, 100)}
    return row


def _mask_times(
    grammars: Grammars, compiled: Sequence[Grammar], ending: frozenset[int], size: Size, seed: int
) -> list[float]:
    """Seconds of the masks of each step, of random answers in all rows."""
    rng, made = np.random.default_rng(seed), 0
    rows: list[Matcher] = []
    width = -(-grammars.vocab_size // 32)
    times = []
    for _ in range(size.tokens):
        while len(rows) < size.rows:
            rows.append(compiled[made % len(compiled)].matcher(ending))
            made += 1
        bits = np.full((size.rows, width), -1, np.int32)
        start = time.perf_counter()
        failed = grammars.fill_masks([(it, i) for i, it in enumerate(rows)], bits)
        times.append(time.perf_counter() - start)
        if failed:
            raise failed[0][1]
        last: list[int] = []
        for i, matcher in enumerate(rows):
            found = np.flatnonzero(np.unpackbits(bits[i].view(np.uint8), bitorder="little"))
            last.append(int(rng.choice(found)))
            matcher.accept(last[-1])
        ended = [it.is_stopped or last[i] in ending for i, it in enumerate(rows)]
        rows = [it for it, is_over in zip(rows, ended, strict=True) if not is_over]
    return times


def speed(engine: Engine, size: Size, num_constrained: int) -> list[float]:
    """Tokens a second of all rows, each run's, while some have a form; after a run to warm up."""
    prompts = random_prompts([16] * size.rows, engine.vocab_size, 0)
    found = []
    for run in range(size.repeats + 1):
        params = [
            SamplingParams(
                seed=run * size.rows + i,
                max_tokens=size.tokens,
                ignore_eos=True,
                structured_outputs=ENDLESS if i < num_constrained else None,
            )
            for i in range(size.rows)
        ]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(it.outputs[0].token_ids) for it in outputs)
        if tokens != size.rows * size.tokens:
            raise RuntimeError(f"{tokens} tokens came, not {size.rows * size.tokens}")
        found.append(tokens / seconds)
    return found[1:]


def speeds(engine: Engine, size: Size) -> list[dict[str, Any]]:
    """The speeds with no row, half of the rows and all rows in a form, one after the other."""
    without = speed(engine, size, 0)
    rows = [_speed_row("unconstrained", without, without)]
    for case, count in (("beside", size.rows // 2), ("constrained", size.rows)):
        rows.append(_speed_row(case, speed(engine, size, count), without))
    rows.append(_speed_row("unconstrained again", speed(engine, size, 0), without))
    return rows


def _speed_row(case: str, found: Sequence[float], without: Sequence[float]) -> dict[str, Any]:
    middle = float(np.median(found))
    return {
        "case": case,
        "tokens_per_s": middle,
        "slowest": min(found),
        "fastest": max(found),
        "of_unconstrained": middle / float(np.median(without)),
    }


@contextmanager
def _folder(shape: str | None) -> Iterator[Path | None]:
    """A folder with a shape's `config.json` and a tokenizer; None for the embedded model."""
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
    parser.add_argument("--shape", choices=[*SHAPES], help="random weights (the embedded model)")
    parser.add_argument("--quick", action="store_true", help="less of everything, for CPUs")
    parser.add_argument("--answers", type=int, help=f"of the shares ({Size().answers})")
    parser.add_argument("--num-scheduler-steps", type=int, help="1: no bursts, which forms end")
    args = parse_arguments(parser)
    size = QUICK if args.quick else Size()
    size = size if args.answers is None else size._replace(answers=args.answers)
    with _folder(args.shape) as folder:
        engine = Engine(folder, **_options(args.shape, size, args.num_scheduler_steps))
        tables = [("masks", [masks(engine, size)]), ("speed", speeds(engine, size))]
        for name, rows in tables:
            print(name)
            print_table(rows)
        tables.append(("shares", [shares(engine, size)]))
        print_table(tables[-1][1])
    rows = [{"table": name, **row} for name, found in tables for row in found]
    print(record("structured", rows, model=args.shape or "embedded", size=size._asdict()))


if __name__ == "__main__":
    main()
