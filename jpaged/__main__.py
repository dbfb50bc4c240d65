"""The `jpaged` command: `jpaged "prompt"` generates text, and `COMMANDS` lists the other commands.

The answer is written to stdout while it is generated. Statistics and errors are written to stderr,
and so is progress if stderr is a terminal. Exit codes: 0 for success, 1 for an error, 2 for an
invalid command line, 130 after Ctrl-C, 141 if the reader of stdout closes it. JAX is imported only
to create an engine, so `--help` and an invalid command line return quickly.
"""

import argparse
import contextlib
import difflib
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpaged import __version__
from jpaged.config import DEFAULT_COMPILATION_CACHE, EngineConfig
from jpaged.errors import error_info
from jpaged.options import CommandLine, add_flags, read_options
from jpaged.sampling_params import SamplingParams
from jpaged.terminal.session import Session, converse, format_error

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine

_DESCRIPTION = "Generate text with a language model and a paged KV cache."
_EXAMPLES = """\
examples:
  jpaged "What is 12 plus 30?"                    use the small model that comes with jpaged
  jpaged --model Qwen/Qwen3-0.6B --chat "Hello"   use a model from the Hugging Face hub or a folder
  jpaged --model Qwen/Qwen3-0.6B --chat           start a conversation; Ctrl-D ends it
  jpaged --temperature 0.8 --top-p 0.95 --seed 1 "Once upon a time"
  jpaged --beam-width 4 "Add 12 and 30"           find the most probable answer by beam search
  jpaged --stats "Count from 1 to 100"            also print blocks, waste and tokens/s
  jpaged --tools-demo                             let the model call a calculator
  cat question.txt | jpaged                       read the prompt from a pipe
  jpaged serve Qwen/Qwen3-0.6B --port 9000        start the HTTP server, as python -m jpaged.serve
  jpaged calibrate MODEL TEXT FOLDER              measure the scales of an FP8 KV cache
  jpaged doctor                                   report what jpaged finds on this machine

The answer is written to stdout, everything else to stderr. Ctrl-C stops the answer and keeps the
text so far.

jpaged serve without a model uses the small model. jpaged serve --help lists the server's options.
To use the word "serve" as a prompt, write: jpaged -- serve
"""
_SHORT_HELP = f"""\
jpaged {__version__}: generate text with a paged KV cache in JAX
  jpaged "Count from 1 to 20"    answer with the small model that is included
  jpaged --model MODEL --chat    chat with a model of the hub or a local folder
  jpaged serve [MODEL]           start the HTTP server and its dashboard
  jpaged doctor                  check this machine; --help lists all options
"""
_NEXT_COMMANDS = """\

next: jpaged --stats "Count from 1 to 100"    see the blocks of the pool
      jpaged serve                            start the HTTP server and its dashboard"""
COMMANDS = {
    "serve": "jpaged.serve.__main__",
    "calibrate": "jpaged.calibrate.__main__",
    "doctor": "jpaged.doctor.__main__",
}
"""Module of each command. Its `main(argv)` runs the command and returns the exit code."""
_INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT
_BROKEN_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE
_SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 512}
_ENGINE_DEFAULTS: dict[str, Any] = {"max_num_seqs": 8}
"""Engine defaults of the command line, which runs one prompt at a time. Few batch rows mean fewer
shapes to compile, so that the first answer comes sooner."""

_OPTIONS_WITHOUT_FLAG = ("seed",)
"""Engine options without a flag: `--seed` sets the seed of the request, not of the engine."""


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `jpaged "prompt"`."""
    parser = CommandLine(prog="jpaged", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("prompt", nargs="?", help="the prompt; '-' or a pipe: read stdin")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    parser.add_argument(
        "--tools-demo",
        action="store_true",
        help="let the model call a calculator; without a prompt: to answer example questions",
    )
    parser.add_argument("--stats", action="store_true", help="print statistics after the answer")
    parser.add_argument(
        "--quiet", action="store_true", help="print no progress and no hints, also on a terminal"
    )
    parser.add_argument("--traceback", action="store_true", help="print the traceback of an error")
    parser.add_argument("--version", action="version", version=f"jpaged {__version__}")
    add_flags(parser, SamplingParams, _SAMPLING_DEFAULTS)
    add_flags(parser, EngineConfig, _ENGINE_DEFAULTS, exclude=_OPTIONS_WITHOUT_FLAG)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the arguments `argv` (default: `sys.argv`) and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        try:
            return import_module(COMMANDS[argv[0]]).main(argv[1:])
        except KeyboardInterrupt:
            return _INTERRUPTED_EXIT_CODE
        except BrokenPipeError:
            _discard_stdout()
            return _BROKEN_PIPE_EXIT_CODE
    if not argv and sys.stdin.isatty():
        print(_SHORT_HELP, end="")
        return 0
    parser = build_parser()
    _check_command(parser, argv)
    args = parser.parse_args(argv)
    params, options = _check_options(parser, args)
    try:
        prompt = _read_prompt(parser, args)
        return _run(args, prompt, params, options)
    except KeyboardInterrupt:
        return _INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        _discard_stdout()
        return _BROKEN_PIPE_EXIT_CODE
    except Exception as error:
        if args.traceback:
            raise
        print(f"error: {format_error(error)}", file=sys.stderr)
        return 1


def _check_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Exit with code 2 if the first argument looks like a mistyped command."""
    if argv and re.fullmatch("[a-z]+", argv[0]):
        for near in difflib.get_close_matches(argv[0], COMMANDS, 1, cutoff=0.75):
            parser.error(
                f"unknown command {argv[0]!r}: did you mean {near!r}? To use the word as a "
                f"prompt, write: jpaged -- {argv[0]}"
            )


def _check_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[SamplingParams, dict[str, Any]]:
    """Return the sampling parameters and the keyword arguments of `Engine`. Exit with code 2 if an
    option is invalid."""
    sampling_options = _SAMPLING_DEFAULTS | read_options(args, SamplingParams)
    options = _ENGINE_DEFAULTS | read_options(args, EngineConfig, exclude=_OPTIONS_WITHOUT_FLAG)
    try:
        EngineConfig(**options)
        params = SamplingParams(**sampling_options)
        if args.tools_demo and (params.n > 1 or not params.is_streamable):
            raise ValueError("--tools-demo prints one answer: omit n, best_of and beam_width")
        return params, options
    except (TypeError, ValueError) as error:
        parser.error(error_info(error).command_line_text)


def _read_prompt(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """Return the prompt from the command line or stdin.

    Return None if no prompt is needed: `--chat` on a terminal starts a conversation, and
    `--tools-demo` has example questions.
    """
    prompt = args.prompt
    if args.tools_demo and (args.chat or args.stats):
        conflicting_flag = "--chat" if args.chat else "--stats"
        parser.error(f"--tools-demo cannot be used with {conflicting_flag}: omit one of them")
    if args.tools_demo and prompt is None:
        return None
    if prompt is None and sys.stdin.isatty():
        if args.chat:
            return None
        parser.error('prompt is missing: pass one, as in: jpaged "Count to 10", or pass --chat')
    if prompt in (None, "-"):
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        parser.error("the prompt is empty: pass at least one character")
    return prompt


def _run(
    args: argparse.Namespace, prompt: str | None, params: SamplingParams, options: dict[str, Any]
) -> int:
    if options.get("model"):
        from jpaged.models.checkpoint import check_model

        # Check the model before JAX is imported, so that an error appears quickly.
        check_model(options["model"])

    from jpaged import Engine

    shows_progress = sys.stderr.isatty() and not args.quiet
    is_first_start = not Path(DEFAULT_COMPILATION_CACHE).expanduser().exists()
    engine = Engine(**options, verbose=shows_progress)
    session = Session(engine, params, stats=args.stats)
    try:
        if args.tools_demo:
            return _run_tools_demo(engine, params, prompt)
        if prompt is None:
            return converse(session)
        is_complete = session.ask_in_chat(prompt) if args.chat else session.ask(prompt)
        if is_first_start and is_complete and shows_progress:
            print(_NEXT_COMMANDS, file=sys.stderr)
        return 0 if is_complete else _INTERRUPTED_EXIT_CODE
    finally:
        engine.abort_all()


def _run_tools_demo(engine: "Engine", params: SamplingParams, prompt: str | None) -> int:
    from jpaged.terminal.tools_demo import QUESTIONS, ToolsDemo

    demo = ToolsDemo(engine, params)
    for i, question in enumerate(QUESTIONS if prompt is None else (prompt,)):
        if i:
            print()
        demo.ask(question)
        if demo.is_interrupted:
            return _INTERRUPTED_EXIT_CODE
    return 0


def _discard_stdout() -> None:
    """Redirect stdout to the null device. Python would otherwise fail at exit, when it flushes a
    stdout whose reader is gone."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
