"""Measure the embedded model on held-out questions: exact match under greedy decoding, by task.

    python -m tools.tiny.evaluate jpaged/assets/tiny --examples 1000 --out evaluation.json

Greedy decoding gives an answer exactly if and only if, with the answer itself as context, every one
of its tokens (the end-of-sequence token included) is the most probable next one; so one forward
pass over question and answer decides an example, and no decoding loop is needed.
"""

import argparse
import functools
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tools.tiny.checkpoint import load_checkpoint
from tools.tiny.data import (
    SYSTEM_MESSAGES,
    Document,
    chat_document,
    dialogue_document,
    one_document_rows,
    raw_document,
)
from tools.tiny.dialogues import TASKS as DIALOGUES
from tools.tiny.dialogues import sample_dialogues
from tools.tiny.model import Config, Params, forward
from tools.tiny.world import TASKS, Example, sample_examples

SEED = 20261121  # of the held-out questions
TOKENS = 16384  # of a forward pass
LENGTHS = (64, 96, 128, 192, 256, 320, 448, 640, 768, 1024)  # of its rows, if not the longest


def evaluate(params: Params, config: Config, examples: int) -> dict[str, dict[str, float]]:
    """The share of exact answers: task -> form (raw, chat, turn) -> 0..1.

    Of a dialogue all that the assistant says counts; it has one form, the chat.

    A "turn" is a question asked late in a chat, after questions on other things; a quarter of the
    questions are put so.
    """
    report = {}
    for task in (*TASKS, *DIALOGUES):
        report[task] = {
            form: float(np.mean(exact(params, config, documents)))
            for form, documents in documents_of(task, examples).items()
        }
        print(task, report[task], flush=True)
    return report


def documents_of(task: str, examples: int) -> dict[str, list[Document]]:
    """A task's held-out questions with their answers, by form."""
    if task in DIALOGUES:
        drawn = sample_dialogues(SEED, examples, task)
        return {"chat": [dialogue_document(each) for each in drawn]}
    questions = sample_examples(SEED, examples, task=task)
    forms = {
        "raw": [raw_document(q) for q in questions],
        "chat": [chat_document([q]) for q in questions],
    }
    if task != "count_long":
        forms["turn"] = [_late_turn(q, i) for i, q in enumerate(questions[: examples // 4])]
    return forms


def exact(params: Params, config: Config, documents: list[Document]) -> list[bool]:
    """Whether greedy decoding gives each document's tokens that bear loss."""
    lengths = [n for n in LENGTHS if n < config.max_position_embeddings]
    lengths.append(config.max_position_embeddings)
    results, start = [False] * len(documents), 0
    for length in lengths:
        chosen = [i for i, doc in enumerate(documents) if start < len(doc.ids) <= length]
        num_rows, start = TOKENS // length, length
        for first in range(0, len(chosen), num_rows):
            group = chosen[first : first + num_rows]
            rows = one_document_rows([documents[i] for i in group], num_rows, length)
            correct = _correct(params, config, *(jnp.asarray(a, jnp.int32) for a in rows))
            for i, is_correct in zip(group, np.asarray(correct), strict=False):
                results[i] = bool(is_correct)
    return results


@functools.partial(jax.jit, static_argnames="config")
@jax.default_matmul_precision("highest")
def _correct(
    params: Params, config: Config, tokens: jax.Array, loss: jax.Array, segments: jax.Array
) -> jax.Array:
    predicted = jnp.argmax(forward(params, config, tokens, segments)[:, :-1], axis=-1)
    return jnp.all((predicted == tokens[:, 1:]) | (loss[:, 1:] == 0), axis=1)


def _late_turn(question: Example, seed: int) -> Document:
    """The question at the end of a chat; only its answer counts."""
    rng = random.Random(seed)
    earlier = sample_examples(seed, rng.randint(2, 8))
    earlier = [example for example in earlier if example.task != "count_long"]
    before = chat_document(earlier[:6], rng.choice((None, *SYSTEM_MESSAGES)))
    last = chat_document([question])
    return Document(before.ids + last.ids, [0] * len(before.ids) + last.loss)


def report_of(report: dict[str, dict[str, float]], examples: int, dtype: str) -> dict[str, object]:
    """The content of evaluation.json."""
    return {"examples": examples, "seed": SEED, "dtype": dtype, "accuracy": report}


def as_markdown(report: dict[str, dict[str, float]]) -> str:
    """The report as the model card's table, in percent."""
    lines = ["| task | raw | chat | later turn of a chat |", "|---|---|---|---|"]
    for task, forms in report.items():
        cells = [f"{100 * forms[form]:.1f}" if form in forms else "" for form in _FORMS]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


_FORMS = ("raw", "chat", "turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--examples", type=int, default=1000, help="for each task and form")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    params, config = load_checkpoint(args.folder, jnp.dtype(args.dtype))
    report = evaluate(params, config, args.examples)
    print(as_markdown(report))
    if args.out:
        written = report_of(report, args.examples, args.dtype)
        args.out.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
