"""Measure how many held-out questions the bundled model answers exactly by greedy decoding.

    python -m tools.tiny.evaluate jpaged/assets/tiny --examples 1000 --out evaluation.json

No decoding loop is needed: one forward pass over the question and the correct answer decides an
example. Greedy decoding gives the answer exactly if each token of the answer, including the
end-of-sequence token, is the most probable token after the tokens before it.
"""

import argparse
import functools
import itertools
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
    raw_document,
    rows_of,
)
from tools.tiny.dialogues import TASKS as DIALOGUES
from tools.tiny.dialogues import sample_dialogues
from tools.tiny.model import Config, Params, forward
from tools.tiny.world import TASKS, Example, sample_examples

# The held-out questions are drawn with this seed.
SEED = 20261121
# A forward pass on a CPU computes `TOKENS` tokens. On a GPU, it computes four times as many.
TOKENS = 16384
# Rows have one of these lengths. A document is put into the shortest row that fits.
LENGTHS = (160, 320, 640, 896)


def evaluate(params: Params, config: Config, examples: int) -> dict[str, dict[str, float]]:
    """Return the fraction of exact answers, from 0 to 1, by task and form.

    In the form "raw", a question is plain text without a chat template. In the form "chat", the
    question is the only turn of a chat. In the form "turn", the question is the last turn of a chat
    with several questions; only a quarter of the questions have this form. A dialogue has only the
    form "chat". A dialogue counts as exact if greedy decoding gives all tokens of the assistant.
    """
    kinds, documents = [], list[Document]()
    for task in (*TASKS, *DIALOGUES):
        for form, own in documents_of(task, examples).items():
            kinds.append((task, form, len(own)))
            documents += own
    results = iter(exact(params, config, documents))
    report: dict[str, dict[str, float]] = {}
    for task, form, count in kinds:
        share = float(np.mean(list(itertools.islice(results, count))))
        report.setdefault(task, {})[form] = share
    return report


def documents_of(task: str, examples: int) -> dict[str, list[Document]]:
    """Return the held-out questions of a task, with their answers, in each form.

    The result maps each form ("raw", "chat" and "turn", see `evaluate`) to a list of documents.
    """
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
    """Return for each document whether greedy decoding gives all tokens that the loss counts."""
    results = [False] * len(documents)
    limits = (0, *LENGTHS, config.max_position_embeddings)
    for shortest, length in itertools.pairwise(limits):
        chosen = [i for i, doc in enumerate(documents) if shortest < len(doc.ids) <= length]
        groups = _groups(chosen, documents, length)
        num_rows = TOKENS * (1 if jax.default_backend() == "cpu" else 4) // length
        for first in range(0, len(groups), num_rows):
            own = groups[first : first + num_rows]
            rows = rows_of([[documents[i] for i in group] for group in own], num_rows, length)
            wrong = _wrong(params, config, *(jnp.asarray(a, jnp.int32) for a in rows))
            for group, segments, mistakes in zip(own, rows.segments, wrong, strict=False):
                counts = np.bincount(segments[1:][np.asarray(mistakes)], minlength=len(group) + 1)
                for i, count in zip(group, counts[1:], strict=True):
                    results[i] = not count
    return results


def _groups(chosen: list[int], documents: list[Document], length: int) -> list[list[int]]:
    """Group document indices into rows of `length` tokens, at most 200 documents per row."""
    groups, room = list[list[int]](), 0
    for i in chosen:
        size = len(documents[i].ids)
        if size > room or len(groups[-1]) == 200:
            groups.append([])
            room = length
        groups[-1].append(i)
        room -= size
    return groups


@functools.partial(jax.jit, static_argnames="config")
@jax.default_matmul_precision("highest")
def _wrong(
    params: Params, config: Config, tokens: jax.Array, loss: jax.Array, segments: jax.Array
) -> jax.Array:
    """Return a mask of wrong predictions, [rows, length - 1].

    A prediction is the most probable next token. It is wrong if the document continues with another
    token. Tokens that the loss does not count are never marked as wrong.
    """

    predicted = jnp.argmax(forward(params, config, tokens, segments)[:, :-1], axis=-1)
    return (predicted != tokens[:, 1:]) & (loss[:, 1:] > 0)


def _late_turn(question: Example, seed: int) -> Document:
    """Return a chat of several questions that ends with `question` and its answer.

    The loss counts only the last answer.
    """
    rng = random.Random(seed)
    earlier = sample_examples(seed, rng.randint(2, 8))
    earlier = [example for example in earlier if example.task != "count_long"]
    before = chat_document(earlier[:6], rng.choice((None, *SYSTEM_MESSAGES)))
    last = chat_document([question])
    return Document(before.ids + last.ids, [0] * len(before.ids) + last.loss)


def report_of(report: dict[str, dict[str, float]], examples: int, dtype: str) -> dict[str, object]:
    """Return the evaluation report, which is written to evaluation.json."""
    return {"examples": examples, "seed": SEED, "dtype": dtype, "accuracy": report}


def as_markdown(report: dict[str, dict[str, float]]) -> str:
    """Return the report as a Markdown table for the model card, in percent."""
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
