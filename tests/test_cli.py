import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import jpaged
from jpaged import __version__
from jpaged.__main__ import build_parser, main
from jpaged.config import EngineConfig
from jpaged.observe.pool_report import BlockInfo, BlockState, MemoryReport
from jpaged.observe.statistics import EngineStats
from jpaged.options import Options, declared_options
from jpaged.outputs import RequestDelta, TextDelta
from jpaged.sampling_params import SamplingParams
from jpaged.serve.options import Flags, Limits, ServeConfig, read_flags

PIECES = ["Hé", "", "llo ", "wörld"]


class FakeEngine:
    """An engine that answers with one text of `PIECES` per step. `script` runs before each step."""

    made: "list[FakeEngine]" = []  # noqa: RUF012
    script: Any = staticmethod(lambda engine, i: None)

    def __init__(self, model: str | None = None, **options: Any):
        self.model, self.options = model, options
        self.prompts: list[Any] = []
        self.params: SamplingParams | None = None
        self.aborted = self.is_shut_down = False
        self.num_tokens = 0
        self.deltas: list[RequestDelta] = []
        FakeEngine.made.append(self)

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self.prompts.append(messages)
        return [1, 2, 3]

    def add_request(self, prompt: Any, params: SamplingParams) -> str:
        self.prompts.append(prompt)
        self.params = params
        steps = self._search if params.beam_width else self._samples if params.n > 1 else self._one
        self.steps = list(steps(params.n))
        self.num_steps = len(self.steps)
        self.deltas.append(RequestDelta("earlier", [TextDelta("late", index=9)], finished=True))
        return "asked"

    def advance(self) -> None:
        FakeEngine.script(self, self.num_steps - len(self.steps))
        self.num_tokens += 1
        deltas = self.steps.pop(0)
        self.deltas.append(RequestDelta("asked", deltas, finished=not self.steps))

    def take_deltas(self) -> list[RequestDelta]:
        deltas, self.deltas = self.deltas, []
        return deltas

    def abort(self, request_id: str) -> None:
        assert request_id == "asked"
        self.aborted = bool(self.steps)

    def _search(self, count: int) -> list[list[TextDelta]]:
        found = [TextDelta(f"found {i}", (5, 6), "stop", index=i) for i in range(count)]
        return [[], [], found]

    def _samples(self, count: int) -> Iterator[list[TextDelta]]:
        """Yield the deltas of each step. Sample i has `count + 1 - i` tokens, all with the id i."""
        for turn in range(count + 1):
            yield [
                TextDelta(f"{i}", (i,), "stop" if turn == count - i else None, index=i)
                for i in range(count)
                if turn <= count - i
            ]

    def _one(self, _: int) -> list[list[TextDelta]]:
        last = len(PIECES) - 1
        return [
            [TextDelta(piece, (i,), "stop" if i == last else None)]
            for i, piece in enumerate(PIECES)
        ]

    def stats(self) -> EngineStats:
        running = int(0 < self.num_tokens < len(PIECES))
        return EngineStats(
            block_size=16,
            num_blocks=100,
            num_free_blocks=100 - 3 * running,
            peak_used_blocks=4,
            num_waste_slots=12 * running,
            num_running=running,
            num_preemptions=2,
            num_prompt_tokens=7 if self.num_tokens else 0,
            num_cached_tokens=5 if self.num_tokens else 0,
            num_cached_blocks=2,
            num_generated_tokens=self.num_tokens,
        )

    def block_map(self) -> dict[int, BlockInfo]:
        return {1: BlockInfo(1, BlockState.USED, 1, 3, ("0",), False, None)}

    def memory_report(self) -> MemoryReport:
        return MemoryReport(16, 100, 36, 12, 0, 32, 1520, 3, 3, 0, 0, 0)

    def abort_all(self) -> None:
        self.is_shut_down = True


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(FakeEngine, "script", staticmethod(lambda engine, i: None))
    replace_engine(monkeypatch, FakeEngine)
    monkeypatch.setattr("jpaged.models.checkpoint.check_model", lambda model: None)


def replace_engine(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """Replace `jpaged.Engine`, but not by `setattr`, which would import the real engine first."""
    monkeypatch.setitem(vars(jpaged), "Engine", engine)


class Stdin(io.StringIO):
    def __init__(self, text: str = "", tty: bool = False):
        super().__init__(text)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


def raise_at(index: int, error: BaseException) -> Any:
    def script(engine: FakeEngine, i: int) -> None:
        if i == index:
            raise error

    return staticmethod(script)


def press_ctrl_c_at(index: int, times: int = 1) -> Any:
    def script(engine: FakeEngine, i: int) -> None:
        for _ in range(times if i == index else 0):
            os.kill(os.getpid(), signal.SIGINT)

    return staticmethod(script)


def exit_code(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code


# One answer


def test_prompt_alone_prints_only_the_answer(capsys: pytest.CaptureFixture[str]):
    assert main(["Hi there"]) == 0
    assert capsys.readouterr() == ("Héllo wörld\n", "")
    (engine,) = FakeEngine.made
    assert engine.model is None
    assert engine.prompts == ["Hi there"]
    assert engine.is_shut_down
    assert engine.params == SamplingParams(temperature=0.0, max_tokens=512)
    assert engine.options == {"verbose": False, "max_num_seqs": 8}  # stderr is no terminal


def test_terminal_run_shows_progress_and_the_first_run_suggests_other_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["Hi"]) == 0
    assert "next: jpaged --stats" in capsys.readouterr().err
    assert main(["Hi", "--quiet"]) == 0
    (tmp_path / ".cache/jpaged/compiled").mkdir(parents=True)  # not the first start
    assert main(["Hi"]) == 0
    assert capsys.readouterr().err == ""
    assert [engine.options["verbose"] for engine in FakeEngine.made] == [True, False, True]


def test_jpaged_alone_prints_five_lines_of_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", Stdin(tty=True))
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("word", "command"), [("serv", "serve"), ("docter", "doctor")])
def test_error_for_a_mistyped_command_suggests_the_command(
    word: str, command: str, capsys: pytest.CaptureFixture[str]
):
    assert exit_code(word, "--port", "1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"did you mean {command!r}?" in line
    assert main(["--", word]) == 0
    assert FakeEngine.made[0].prompts == [word]


def test_flags_set_engine_and_sampling_options():
    argv = (
        "x --model m --dtype float32 --load-format dummy --block-size 8 "
        "--kv-cache-memory-bytes 1.5G --gpu-memory-utilization 0.5 --max-model-len 64 "
        "--max-num-seqs 2 --max-num-batched-tokens 32 --no-overlap --quiet "
        "--no-enable-prefix-caching --preemption-mode auto --swap-space 1.5 --kv-cache-dtype fp8 "
        "--num-scheduler-steps 4 --num-compile-workers 0 --scheduling-policy priority "
        "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --max-tokens 4 "
        "--stop A --stop B --ignore-eos"
    )
    assert main(argv.split()) == 0
    (engine,) = FakeEngine.made
    assert engine.model == "m"
    assert engine.options == {
        "dtype": "float32",
        "kv_cache_dtype": "fp8",
        "load_format": "dummy",
        "block_size": 8,
        "kv_cache_memory_bytes": 3 * 2**29,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "async_scheduling": False,
        "enable_prefix_caching": False,
        "preemption_mode": "auto",
        "swap_space": 1.5,
        "num_scheduler_steps": 4,
        "num_compile_workers": 0,
        "scheduling_policy": "priority",
        "verbose": False,
    }
    draws = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
    ends = {"max_tokens": 4, "stop": ["A", "B"], "ignore_eos": True}
    assert engine.params == SamplingParams(**draws, **ends)


def test_every_option_of_the_engine_is_a_flag():
    words = build_parser().format_help().split()
    for option in fields(EngineConfig):
        # The command line has no flag for these options.
        if option.name not in ("verbose", "skip_tokenizer_init"):
            flag = f"--{option.name.replace('_', '-')}"
            assert {flag, f"{flag},"} & {*words}, option.name


@pytest.mark.parametrize("argv", [["-"], []])
def test_prompt_is_read_from_stdin(argv: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", Stdin("two\nlines\n"))
    assert main(argv) == 0
    assert FakeEngine.made[0].prompts == ["two\nlines"]


def test_chat_option_applies_the_chat_template():
    assert main(["--chat", "Hi"]) == 0
    assert FakeEngine.made[0].prompts == [[{"role": "user", "content": "Hi"}], [1, 2, 3]]


def test_stats_option_prints_tokens_blocks_and_speed(capsys: pytest.CaptureFixture[str]):
    FakeEngine.script = staticmethod(lambda engine, i: time.sleep(0.001))
    assert main(["--stats", "Hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "Héllo wörld\n"
    assert "7 prompt, 4 generated (stop)" in err
    assert "3 used at the end, peak 4, total 100 (of 16 tokens)" in err
    assert "12 of 48 slots in last blocks (25.0%)" in err
    assert "5 of the prompt's tokens cached, 2 free blocks cached" in err
    assert "0 preemptions" in err
    assert "first token after 0.0" in err
    assert "tokens/s" in err
    assert "36 with tokens, 12 reserved" in err
    assert err.endswith("        1 +\n")


def test_stats_option_prints_a_singular_noun_if_the_number_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    stats = FakeEngine.stats

    def stats_of_one(engine: FakeEngine) -> EngineStats:
        counts = {"block_size": 1, "num_cached_blocks": 1}
        return replace(stats(engine), num_preemptions=min(engine.num_tokens, 1), **counts)

    monkeypatch.setattr(FakeEngine, "stats", stats_of_one)
    assert main(["--stats", "Hi"]) == 0
    err = capsys.readouterr().err
    for part in ("(of 1 token)", ", 1 free block cached", "pressure  1 preemption\n"):
        assert part in err


@pytest.mark.parametrize("options", [SamplingParams, EngineConfig, ServeConfig, Limits])
def test_help_text_of_an_option_does_not_begin_with_a_conjunction(options: type[Options]):
    for name, (_, option) in declared_options(options).items():
        first = option.help.partition(" ")[0]
        continuing = {"or", "and", "of", "to", "for", "until", "that", "without", "taken"}
        assert first not in continuing, f"{name}: {option.help}"


# Several answers


def test_samples_are_printed_one_after_another(capsys: pytest.CaptureFixture[str]):
    assert main(["Hi", "--n", "3", "--temperature", "1", "--seed", "4"]) == 0
    (engine,) = FakeEngine.made
    assert engine.params == SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=512)
    out, err = capsys.readouterr()
    assert out == "0000\n111\n22\n"
    assert err.splitlines() == ["answer 1 of 3:", "answer 2 of 3:", "answer 3 of 3:"]


def test_beam_search_prints_the_best_answers_at_its_end(capsys: pytest.CaptureFixture[str]):
    assert main(["Hi", "--beam-width", "4", "--stats"]) == 0
    (engine,) = FakeEngine.made
    assert engine.params == SamplingParams(beam_width=4, temperature=0.0, max_tokens=512)
    out, err = capsys.readouterr()
    assert out == "found 0\n"
    assert "2 generated (stop)" in err
    assert not engine.aborted
    assert main(["Hi", "--beam-width", "4", "--n", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == "found 0\nfound 1\n"
    assert err == "answer 1 of 2:\nanswer 2 of 2:\n"


def test_ctrl_c_aborts_a_beam_search(capsys: pytest.CaptureFixture[str]):
    FakeEngine.script = press_ctrl_c_at(1)
    assert main(["Hi", "--beam-width", "2"]) == 130
    assert capsys.readouterr().out == ""
    assert FakeEngine.made[0].aborted


# The server


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Flags]]:
    """Replace the server, and return a list to which the flags of each started server are added."""
    flags = list[Flags]()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr("jpaged.serve.http.lifecycle.run_server", lambda it: flags.append(it) or 0)
    yield flags
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "argv", [["Qwen/Qwen3-8B", "--port", "9"], ["--port", "9", "--model", "Qwen/Qwen3-8B"]]
)
def test_serve_starts_the_server(
    argv: list[str], served: list[Flags], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["jpaged", "serve", *argv])
    assert main() == 0
    assert served == [read_flags(argv)]
    assert served[0].engine["model"] == "Qwen/Qwen3-8B"
    assert served[0].serve.port == 9
    assert not FakeEngine.made


def test_serve_without_a_model_serves_the_model_in_the_package(served: list[Flags]):
    assert main(["serve"]) == 0
    assert "model" not in served[0].engine
    assert served[0].serve.model_names == ("jpaged-tiny",)


def test_serve_with_two_models_is_refused(served: list[Flags], capsys: pytest.CaptureFixture[str]):
    assert exit_code("serve", "one", "--model", "two") == 2
    assert "two models are named: one and --model two" in capsys.readouterr().err
    assert not served


def test_command_name_after_a_double_dash_is_a_prompt(served: list[Flags]):
    assert main(["--", "serve"]) == 0
    assert FakeEngine.made[0].prompts == ["serve"]
    assert not served


# What goes wrong


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["x", "--top-p", "3"], "--top-p 3.0 is out of range"),
        (["x", "--top-p", "nan"], "--top-p nan"),
        (["x", "--max-tokens", "0"], "--max-tokens 0"),
        (["x", "--stop", ""], "empty string"),
        (["x", "--n", "2"], "--n 2 with temperature=0"),
        (["x", "--n", "3", "--beam-width", "2"], "--n 3 is more than beam_width=2"),
        (["x", "--beam-width", "0"], "--beam-width 0"),
        (["x", "--preemption-mode", "kill"], "--preemption-mode 'kill' is not supported; choose"),
        (["--tempreature", "1", "x"], "option --tempreature: did you mean --temperature?"),
        (["--tempreature=1", "x"], "unknown option --tempreature: did you mean --temperature?"),
        (["x", "--temp", "1"], "unknown option --temp: did you mean --temperature?"),
        (["--frobnicate", "x"], "unknown option --frobnicate: see jpaged --help"),
        (["-t", "1", "x"], "unknown option -t: see jpaged --help"),
        (["x", "--temperature", "--quiet"], "argument --temperature: expected one argument"),
        (["x", "--top-k", "many"], "argument --top-k: 'many' is not"),
        (["x", "--dtype", "int4"], "--dtype 'int4' is not supported; choose one of auto"),
        (["x", "--kv-cache-memory-bytes", "lots"], "'lots' is not a number of bytes"),
        (["x", "--kv-cache-memory-bytes", "infG"], "'infG' is not a number of bytes"),
        (["x", "y"], "unexpected argument 'y': quote"),
        ([""], "the prompt is empty"),
        (["-"], "the prompt is empty"),
        ([], "the prompt is empty"),
    ],
)
def test_invalid_arguments_are_one_line_errors(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys, "stdin", Stdin())
    assert exit_code(*argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jpaged: error: ")
    assert message in line
    assert not FakeEngine.made


@pytest.mark.parametrize("prompt", ["-5 + 3 = ?", "-5", "-- why?", "-"])
def test_prompt_may_begin_with_a_dash(prompt: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", Stdin("-"))
    assert main([prompt]) == 0
    assert FakeEngine.made[0].prompts == [prompt]


def test_missing_prompt_error_shows_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", Stdin(tty=True))
    assert exit_code("--stats") == 2
    assert "prompt is missing: pass one, as in: jpaged" in capsys.readouterr().err


@pytest.mark.parametrize(("piece", "out"), [(0, ""), (1, "Hé\n")])
def test_engine_error_prints_one_line_and_keeps_the_partial_answer(
    piece: int, out: str, capsys: pytest.CaptureFixture[str]
):
    FakeEngine.script = raise_at(piece, ValueError("does\n  not fit"))
    assert main(["Hi"]) == 1
    assert capsys.readouterr() == (out, "error: does not fit\n")
    assert FakeEngine.made[0].is_shut_down
    with pytest.raises(ValueError, match="does"):
        main(["Hi", "--traceback"])


def test_failed_request_prints_its_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    last = TextDelta("", finish_reason="error")
    failed = RequestDelta("asked", [last], finished=True, error="no memory")
    monkeypatch.setattr(FakeEngine, "take_deltas", lambda _: [failed])
    assert main(["Hi"]) == 1
    assert capsys.readouterr() == ("", "error: the request failed: no memory\n")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(MemoryError, 1, "error: MemoryError\n"), (KeyboardInterrupt, 130, "")],
)
def test_failed_engine_start_sets_exit_code_and_message(
    error: type[BaseException],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def fail(**_: object) -> None:
        raise error

    replace_engine(monkeypatch, fail)
    assert main(["Hi"]) == code
    assert capsys.readouterr() == ("", message)


def test_closed_stdout_exits_with_141(monkeypatch: pytest.MonkeyPatch):
    FakeEngine.script = raise_at(1, BrokenPipeError())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["Hi"]) == 141


# Ctrl-C


@pytest.mark.parametrize(
    ("script", "text"),
    [(press_ctrl_c_at(2), "Héllo \n"), (raise_at(2, KeyboardInterrupt()), "Hé\n")],
    ids=["signal", "exception"],
)
def test_ctrl_c_keeps_the_text_and_aborts(
    script: Any, text: str, capsys: pytest.CaptureFixture[str]
):
    FakeEngine.script = script
    before = signal.getsignal(signal.SIGINT)
    assert main(["Hi", "--stats"]) == 130
    out, err = capsys.readouterr()
    assert out == text
    assert "(interrupted)" in err
    (engine,) = FakeEngine.made
    assert engine.aborted
    assert engine.is_shut_down
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_stops_immediately(capsys: pytest.CaptureFixture[str]):
    FakeEngine.script = press_ctrl_c_at(2, times=2)
    assert main(["Hi"]) == 130
    assert capsys.readouterr().out == "Hé\n"


def test_function_main_can_run_outside_the_main_thread(capsys: pytest.CaptureFixture[str]):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main, ["Hi"]).result() == 0
    assert capsys.readouterr() == ("Héllo wörld\n", "")


# A conversation


def converse(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> int:
    said = iter([*lines, EOFError()])

    def read(prompt: str = "") -> str:
        line = next(said)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", Stdin(tty=True))
    return main(["--chat"])


def conversation() -> list[Any]:
    return [prompt for prompt in FakeEngine.made[0].prompts if prompt != [1, 2, 3]]


def test_conversation_keeps_its_history(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert converse(monkeypatch, "one", "  ", "two") == 0
    first, second = conversation()
    assert first == [{"role": "user", "content": "one"}]
    assert second == [
        *first,
        {"role": "assistant", "content": "Héllo wörld"},
        {"role": "user", "content": "two"},
    ]
    assert capsys.readouterr().out == "Héllo wörld\nHéllo wörld\n\n"


def test_failed_message_is_left_out_of_the_conversation_history(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fail_once(engine: FakeEngine, i: int) -> None:
        if len(engine.prompts) == 2:
            raise ValueError("too long")

    FakeEngine.script = staticmethod(fail_once)
    assert converse(monkeypatch, "one", "two") == 0
    assert conversation()[1] == [{"role": "user", "content": "two"}]
    assert "error: too long" in capsys.readouterr().err


def test_ctrl_c_ends_an_answer_and_then_the_conversation(monkeypatch: pytest.MonkeyPatch):
    FakeEngine.script = press_ctrl_c_at(2)
    assert converse(monkeypatch, "one", "two", KeyboardInterrupt()) == 130
    assert conversation()[1][1] == {"role": "assistant", "content": "Héllo "}
    assert FakeEngine.made[0].is_shut_down


# As a process


def test_help_and_version_import_no_jax(capsys: pytest.CaptureFixture[str]):
    code = (
        "import runpy, sys\n"
        "sys.argv = ['jpaged', '--help']\n"
        "try: runpy.run_module('jpaged', run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert not {'jax', 'flax', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "examples:" in done.stdout
    assert "--chat" in done.stdout
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"jpaged {__version__}\n"


@pytest.mark.parametrize(
    ("command", "model", "message"),
    [
        ("jpaged", "/absent", "model='/absent' is not a folder"),
        ("jpaged.serve", "/absent", "model='/absent' is not a folder"),
        ("jpaged.calibrate", "/absent", "model='/absent' is not a folder"),
        ("jpaged.serve", "owner/absent", "could not reach the model hub"),
    ],
)
def test_wrong_model_is_refused_before_large_imports(
    command: str, model: str, message: str, tmp_path: Path
):
    rest = {"jpaged": ["Hi"], "jpaged.serve": ["--port", "0"]}.get(command, ["text", "folder"])
    option = [] if command == "jpaged.calibrate" else ["--model"]
    code = (
        "import runpy, sys\n"
        f"sys.argv = {[command, *option, model, *rest]}\n"
        f"try: runpy.run_module({command!r}, run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 1\n"
        "assert not {'jax', 'flax', 'transformers', 'uvicorn'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command_line = [sys.executable, "-c", code]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.removeprefix("jpaged: ").startswith("error: ")
    assert message in line
