"""Measure how FP8 changes the model that ships with jpaged: exact answers by task, and drift.

    python -m tools.tiny.fp8_accuracy --examples 1000

For each weight format, an engine gets the held-out questions of `tools.tiny.evaluate` with their
answers as prompts, and returns the log-probabilities of the prompt tokens. Greedy decoding would
give an answer exactly if each of its tokens is the most probable token after the tokens before it.
The drift compares the log-probabilities of the answer tokens with those that an engine with float32
weights returns. The drift is the mean of the absolute differences.

The format `fp8` quantizes the weights while they are loaded, with a scale for each output. The
formats `fp8_tensor` and `fp8_block` are checkpoints that this script writes, with a scale for each
tensor, or for each block of 128 x 128. All formats quantize activation rows dynamically. The KV
cache may be in FP8 too.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import Engine, SamplingParams
from jpaged.config import EMBEDDED_MODEL
from tools.tiny.data import Document
from tools.tiny.dialogues import TASKS as DIALOGUES
from tools.tiny.evaluate import SEED, documents_of
from tools.tiny.world import TASKS

FORMATS = ("float32", "fp8", "fp8_tensor", "fp8_block")
KV_CACHES = ("float32", "fp8")
LARGEST = np.float32(448)
BLOCK = 128
AT_ONCE = 512


@contextmanager
def folder_of(kept: str) -> Iterator[tuple[Path, str | None]]:
    """Yield the folder of a checkpoint in a weight format, and the engine option `quantization`
    with which to load it."""
    if kept in ("float32", "fp8"):
        yield EMBEDDED_MODEL, None if kept == "float32" else "fp8"
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EMBEDDED_MODEL, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        block = [BLOCK, BLOCK] if kept == "fp8_block" else None
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        for path in [path for path in tensors if path.endswith("proj.weight")]:
            tensors[path], scale = narrowed(tensors[path].astype(np.float32), block)
            tensors[f"{path}_scale_inv"] = scale
        save_file(tensors, folder / "model.safetensors")
        yield folder, None


def narrowed(weight: np.ndarray, block: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a weight to FP8. Return the FP8 weight and one scale, or one scale per block."""
    size = weight.shape if block is None else block
    counts = [-(-whole // own) for whole, own in zip(weight.shape, size, strict=True)]
    padded = np.zeros([count * own for count, own in zip(counts, size, strict=True)], np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.reshape(counts[0], size[0], counts[1], size[1])
    scale = np.abs(blocks).max((1, 3)) / LARGEST
    narrow = (blocks / scale[:, None, :, None]).reshape(padded.shape)
    narrow = narrow[: weight.shape[0], : weight.shape[1]].astype(ml_dtypes.float8_e4m3fn)
    return narrow, scale if block is not None else scale.reshape(())


def scores(engine: Engine, documents: list[Document]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Score the documents with the engine.

    Returns:
        Whether each document's answer is exact; and for each document, the log-probabilities of the
        answer's tokens.
    """
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    exact, found = [], []
    for first in range(0, len(documents), AT_ONCE):
        own = documents[first : first + AT_ONCE]
        outputs = engine.generate([it.ids for it in own], params)
        for document, output in zip(own, outputs, strict=True):
            entries: Any = output.prompt_logprobs
            places = [place for place in range(1, len(document.ids)) if document.loss[place]]
            answer = [entries[place][document.ids[place]] for place in places]
            exact.append(all(it.rank == 1 for it in answer))
            found.append(np.array([it.logprob for it in answer]))
    return np.array(exact), found


def measure(
    engine: Engine, examples: int, base: dict[str, list[np.ndarray]], label: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield a result row for each task and each form of question.

    The form of a question is raw text, a chat, or a later turn of a chat (see `evaluate`). `base`
    holds the log-probabilities of the answers from the first engine that was measured. If `base` is
    empty, this function fills it. The row's `drift` is the mean absolute difference between the
    log-probabilities from `engine` and `base`.
    """
    for task in (*TASKS, *DIALOGUES):
        for form, documents in documents_of(task, examples).items():
            exact, found = scores(engine, documents)
            before = base.setdefault(f"{task}, {form}", found)
            drift = np.abs(np.concatenate(found) - np.concatenate(before))
            yield {
                **label,
                "task": task,
                "form": form,
                "exact": float(exact.mean()),
                "drift": float(drift.mean()),
            }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each combination of weight format and KV cache format, over all tasks."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["weights"], row["kv_cache"]), []).append(row)
    lines, first = [], next(iter(groups.values()))
    base = {(it["task"], it["form"]): it["exact"] for it in first}
    for (kept, cache), own in groups.items():
        losses = [base[it["task"], it["form"]] - it["exact"] for it in own]
        lost, worst = max(losses), own[int(np.argmax(losses))]
        lines.append(
            {
                "weights": kept,
                "KV cache": cache,
                "exact, %": 100 * np.mean([it["exact"] for it in own]),
                "most lost, points": 100 * lost,
                "in": f"{worst['task']}, {worst['form']}",
                "drift": np.mean([it["drift"] for it in own]),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=1000, help="for each task and form")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--kv-cache", nargs="+", choices=KV_CACHES, default=["float32"])
    args = parse_arguments(parser)
    rows: list[dict[str, Any]] = []
    base: dict[str, list[np.ndarray]] = {}
    asked = [(kept, cache) for cache in args.kv_cache for kept in args.formats]
    for kept, cache in dict.fromkeys([("float32", "float32"), *asked]):
        with folder_of(kept) as (folder, quantization):
            options: dict[str, Any] = {"dtype": "float32", "quantization": quantization}
            options |= {"kv_cache_dtype": cache, "max_num_batched_tokens": 2048}
            engine = Engine(folder, **options)
            label = {"weights": kept, "kv_cache": cache}
            for row in measure(engine, args.examples, base, label):
                rows.append(row)
                print(row, flush=True)
            del engine
        path = record("fp8_accuracy", rows, examples=args.examples, seed=SEED)
    print_table(summary(rows))
    print(path)


if __name__ == "__main__":
    main()
