"""`python -m jpaged "prompt"`: generate text in the terminal.

The answer goes to stdout as it is made; progress, figures and errors go to stderr. Exit codes: 0,
1 for an error, 2 for a mistake in the command line, 130 after Ctrl-C. JAX is imported only when
an engine is made, so `--help` and mistakes answer at once.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jpaged import __version__
from jpaged.sampling_params import SamplingParams
from jpaged.terminal import Session, converse, one_line

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine

_DESCRIPTION = "Generate text with a language model whose KV cache is paged."
_EXAMPLES = """\
examples:
  jpaged "What is 12 plus 30?"                    the small model that comes with jpaged
  jpaged --model Qwen/Qwen3-0.6B --chat "Hello"   a model of the Hugging Face hub, or a folder
  jpaged --model Qwen/Qwen3-0.6B --chat           a conversation; Ctrl-D ends it
  jpaged --temperature 0.8 --top-p 0.95 --seed 1 "Once upon a time"
  jpaged --beam-width 4 "Add 12 and 30"           the most probable answer, found by beam search
  jpaged --stats "Count from 1 to 100"            also blocks, waste and tokens/s
  cat question.txt | jpaged                       the prompt from a pipe

The answer goes to stdout, all else to stderr. Ctrl-C ends it and keeps the text so far.
"""
_INTERRUPTED = 130  # 128 + SIGINT
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ENGINE_FLAGS = (
    "model",
    "dtype",
    "load_format",
    "block_size",
    "num_blocks",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "async_scheduling",
    "enable_prefix_caching",
    "preemption_mode",
    "swap_space",
    "compilation_cache_dir",
)
_SAMPLING_FLAGS = (
    "n",
    "best_of",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "stop",
    "ignore_eos",
)


def build_parser() -> argparse.ArgumentParser:
    """The command line, with its help."""
    parser = argparse.ArgumentParser(
        prog="jpaged",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; '-' or a pipe: read it from stdin")
    parser.add_argument("--chat", action="store_true", help="ask through the chat template")
    parser.add_argument("--stats", action="store_true", help="show figures after the answer")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    parser.add_argument("--version", action="version", version=f"jpaged {__version__}")
    _add_sampling_flags(parser.add_argument_group("how tokens are chosen"))
    _add_engine_flags(parser.add_argument_group("the engine (unset: chosen for model and device)"))
    return parser


def _add_sampling_flags(group: Any) -> None:
    add = group.add_argument
    add("--n", type=int, default=1, metavar="N", help="so many answers; stderr names each")
    add("--best-of", type=int, metavar="M", help="of M samples show the N likeliest")
    add("--beam-width", type=int, metavar="K", help="search with K beams, show the N best")
    add("--length-penalty", type=float, default=1.0, metavar="A", help="of beams (default 1)")
    add("--early-stopping", action="store_true", help="end a search with its K-th answer")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest (default)")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the top tokens of this mass")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest; 0: all")
    add("--min-p", type=float, default=0.0, metavar="P", help="keep tokens over P x the top one")
    add("--seed", type=int, metavar="N", help="the same N gives the same answer")
    add("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default 512)")
    add("--stop", action="append", metavar="TEXT", help="end before TEXT; may be repeated")
    add("--ignore-eos", action="store_true", help="go on past the model's end token")


def _add_engine_flags(group: Any) -> None:
    add = group.add_argument
    add("--model", metavar="FOLDER_OR_ID", help="checkpoint folder or hub id (unset: built in)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="weights and KV cache")
    add("--load-format", choices=("auto", "safetensors", "dummy"), help="dummy: random weights")
    add("--block-size", type=int, metavar="N", help="tokens in a KV block (default 16)")
    add("--num-blocks", type=int, metavar="N", help="KV blocks in the pool")
    add("--kv-cache-memory-bytes", type=_num_bytes, metavar="N", help="or its size: 800M, 20G")
    add("--gpu-memory-utilization", type=float, metavar="F", help="or from this share (0.9)")
    add("--max-model-len", type=int, metavar="N", help="longest prompt and answer together")
    # One prompt runs at a time: fewer shapes to compile, and the first answer comes sooner.
    add("--max-num-seqs", type=int, default=8, metavar="N", help="most sequences in a step (8)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step")
    modes = ("recompute", "swap", "auto")
    add("--preemption-mode", choices=modes, help="for KV that must make room (recompute)")
    add("--swap-space", type=float, metavar="GIB", help="host memory for swapped KV (default 4)")
    add("--compilation-cache-dir", metavar="FOLDER", help="where compiled programs are kept")
    add(
        "--no-async-scheduling",
        "--no-overlap",
        dest="async_scheduling",
        action="store_false",
        default=None,
        help="the host waits for each step",
    )
    add(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        default=None,
        help="compute every prompt from its first token",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    params = _sampling_params(parser, args)
    try:
        prompt = _read_prompt(parser, args)
        return _run(args, prompt, params)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return _BROKEN_PIPE
    except Exception as error:
        if args.traceback:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1


def _sampling_params(parser: argparse.ArgumentParser, args: argparse.Namespace) -> SamplingParams:
    try:
        return SamplingParams(**{name: getattr(args, name) for name in _SAMPLING_FLAGS})
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def _read_prompt(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """The prompt, or None for a conversation at the terminal."""
    prompt = args.prompt
    if prompt is None and sys.stdin.isatty():
        if args.chat:
            return None
        parser.error('give a prompt, as in: jpaged "Count from 1 to 10"; or --chat to converse')
    if prompt in (None, "-"):
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        parser.error("the prompt is empty")
    return prompt


def _run(args: argparse.Namespace, prompt: str | None, params: SamplingParams) -> int:
    session = Session(_make_engine(args), params, stats=args.stats)
    try:
        if prompt is None:
            return converse(session)
        complete = session.ask_in_chat(prompt) if args.chat else session.ask(prompt)
        return 0 if complete else _INTERRUPTED
    finally:
        session.engine.abort_all()


def _make_engine(args: argparse.Namespace) -> "Engine":
    from jpaged import Engine

    given = {name: getattr(args, name) for name in _ENGINE_FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    return Engine(**given, verbose=not args.quiet)


def _num_bytes(text: str) -> int:
    """A number of bytes: '123456', '800M', '20G' (powers of 1024)."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        return int(float(text[:-1]) * unit) if unit else int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes, such as 800M or 20G"
        ) from None


def _drop_stdout() -> None:
    """Nobody reads any more: keep the interpreter from failing to flush when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
