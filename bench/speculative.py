"""Measure speculative decoding at given acceptance rates (`python -m bench.speculative`).

`HashDrafter`, which only this benchmark uses, proposes tokens. A hash of the sequence and the
position decides which of the tokens are accepted. The weights are random, so the times do not
depend on the tokens. The first token of each prompt is its acceptance rate in percent.

For each number of rows and drafts, the rows of the result are

    cost       time of a verify step / time of a plain step (as the engine runs it, with bursts)
    speed-up   time per token of plain steps / time per token with drafts, always verified
    chosen     fraction of the decode steps that verified drafts when the scheduler chooses

`jpaged/runtime/verify_costs.py` has the costs that the scheduler uses.

With `--chats`, the benchmark runs chats with the model that ships with jpaged, and drafts come from
prompt lookup. Each chat asks the same question twice. The result is the number of tokens per decode
step.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from bench.common import ALL_SHAPES, EMBEDDED, new_engine, random_prompts
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import Engine, SamplingParams
from jpaged.core.plan import NO_DRAFT
from jpaged.runtime import model_runner, step_programs, steps
from jpaged.runtime.drafting import DraftInputs

ACCEPTANCE = (0, 30, 60, 90, 100)  # acceptance rates in percent
PROMPT_LEN = 128


@dataclass(frozen=True)
class HashDrafter:
    """Drafter whose proposals are accepted at a given rate.

    A hash decides for each draft: an accepted draft is an even token id, a rejected draft an odd
    token id (see `accept_even`).
    """

    num_drafts: int

    def __call__(self, inputs: DraftInputs) -> Int32[Array, "B k"]:
        percent, seed = inputs.history[:, :1], inputs.history[:, 1:2]
        position = inputs.lengths[:, None] + jnp.arange(self.num_drafts, dtype=jnp.int32)[None]
        mixed = (position * 40503 + seed * 9973).astype(jnp.uint32) * jnp.uint32(2654435761)
        is_accepted = (mixed >> 16).astype(jnp.int32) % 100 < percent
        drafts = jnp.where(is_accepted, 2, 1)
        return jnp.where(inputs.lengths[:, None] > 1, drafts, NO_DRAFT)


def accept_even(drafts: Int32[Array, "B"], token_ids: Int32[Array, "B"]) -> Bool[Array, "B"]:
    return (drafts >= 0) & (drafts % 2 == 0) & (token_ids >= 0)


@contextmanager
def hash_drafts() -> Iterator[None]:
    """Inside the `with` block, make new engines draft with `HashDrafter`, and accept every draft
    whose token id is even."""

    def make(config) -> HashDrafter:
        return HashDrafter(config.num_padded_drafts)

    with (
        patch.object(step_programs, "make_drafter", make),
        patch.object(model_runner, "make_drafter", make),
        patch.object(steps, "are_accepted", accept_even),
    ):
        yield


class AlwaysVerify:
    """A context manager that sets the costs of verifying drafts to 0. Inside the `with` block, the
    scheduler verifies drafts in every decode step that is small enough for drafts."""

    def __init__(self, engine: Engine):
        self._speculation = engine._loop.scheduler.speculation

    def __enter__(self) -> None:
        speculation = self._speculation
        if speculation is not None:
            self._costs = speculation._costs
            speculation._costs = tuple((rows, 0.0) for rows, _ in self._costs)

    def __exit__(self, *_: object) -> None:
        if self._speculation is not None:
            self._speculation._costs = self._costs


def time_tokens(engine: Engine, rows: int, percent: int, num_tokens: int, repeats: int) -> float:
    """Run a batch of `rows` rows, and return the milliseconds per output token of a row. The time
    of the prefill does not count.

    `percent` is the acceptance rate of drafts.
    """
    seeds = itertools.count()

    def run(max_tokens: int) -> float:
        prompts = random_prompts([PROMPT_LEN] * rows, engine.vocab_size, next(seeds))
        for prompt in prompts:
            prompt[0] = percent
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run(num_tokens)
    first = statistics.median(run(1) for _ in range(repeats))
    whole = statistics.median(run(num_tokens) for _ in range(repeats))
    return 1e3 * (whole - first) / (num_tokens - 1)


def measure(shape: str, num_drafts: int, args: argparse.Namespace) -> Iterator[dict]:
    """Yield the result rows for one model shape and one number of drafts per step."""
    options = {"max_num_seqs": max(args.rows), "max_model_len": PROMPT_LEN + args.tokens}
    plain = new_engine(shape, **options)
    plain_ms = {rows: time_tokens(plain, rows, 0, args.tokens, args.repeats) for rows in args.rows}
    del plain
    with hash_drafts():
        engine = new_engine(
            shape,
            speculative_config={"num_speculative_tokens": num_drafts},
            num_compile_workers=0,
            **options,
        )
    for rows in args.rows:
        for percent in args.acceptance:
            with AlwaysVerify(engine):
                drafted_ms = time_tokens(engine, rows, percent, args.tokens, args.repeats)
            before = engine.stats()
            chosen_ms = time_tokens(engine, rows, percent, args.tokens, args.repeats)
            after = engine.stats()
            num_verified = after.num_verify_steps - before.num_verify_steps
            yield {
                "shape": shape,
                "rows": rows,
                "drafts": num_drafts,
                "acceptance": percent / 100,
                "plain_ms": round(plain_ms[rows], 3),
                "drafted_ms": round(drafted_ms, 3),
                "chosen_ms": round(chosen_ms, 3),
                "speed_up": round(plain_ms[rows] / drafted_ms, 2),
                "chosen_speed_up": round(plain_ms[rows] / chosen_ms, 2),
                "chosen": round(num_verified / (after.num_steps - before.num_steps), 2),
                **({"cost": round(drafted_ms / plain_ms[rows], 2)} if percent == 0 else {}),
            }


def measure_chats(num_drafts: int) -> dict:
    """Return the result row for chats with the model that ships with jpaged.

    In each chat, the user asks a question, the model answers, and the user asks the same question
    again. The drafter copies the draft tokens of the second answer from the first answer.
    """
    engine = Engine(speculative_config={"num_speculative_tokens": num_drafts})
    params = SamplingParams(temperature=0.0, max_tokens=80)
    questions = [f"Count from {first} to {first + 11}" for first in range(1, 12)]
    chats = []
    for question in questions:
        [answered] = engine.chat([{"role": "user", "content": question}], params, use_tqdm=False)
        answer = answered.outputs[0].text.strip()
        turns = ("user", question), ("assistant", answer), ("user", question)
        chats.append([{"role": role, "content": content} for role, content in turns])
    before = engine.stats()
    # Run one chat at a time. If chats ran together, the longest answer would determine the number
    # of steps.
    for chat in chats:
        engine.chat(chat, params, use_tqdm=False)
    after = engine.stats()
    num_tokens = after.num_generated_tokens - before.num_generated_tokens - len(chats)
    # do not count the prefill step of each chat
    num_steps = after.num_steps - before.num_steps - len(chats)
    num_drafts_seen = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return {
        "shape": EMBEDDED,
        "chats": len(chats),
        "drafts": num_drafts,
        "acceptance": round(num_accepted / num_drafts_seen, 2),
        "decode_steps": num_steps,
        # `num_tokens` excludes the first token of each chat, which its prefill samples.
        "tokens_per_step": round(num_tokens / num_steps, 2),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure speculative decoding.")
    parser.add_argument(
        "--shape", nargs="+", choices=[*ALL_SHAPES, EMBEDDED], default=["qwen3-0.6b"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--drafts", nargs="+", type=int, default=[3])
    parser.add_argument("--acceptance", nargs="+", type=int, default=list(ACCEPTANCE))
    parser.add_argument("--tokens", type=int, default=256, help="tokens per answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chats", action="store_true", help="chats with the bundled model")
    args = parse_arguments(parser, argv)
    if args.chats:
        found = [measure_chats(num_drafts) for num_drafts in args.drafts]
        print_table(found)
        record("speculative_chats", found)
        return
    for shape in args.shape:
        for num_drafts in args.drafts:
            found = list(measure(shape, num_drafts, args))
            print_table(found)
            record("speculative", found, by=("shape", "drafts", "rows", "acceptance"))


if __name__ == "__main__":
    main()
