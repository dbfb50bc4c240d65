"""Test parsing the server's command line."""

import sys
from pathlib import Path
from typing import Any

import pytest

from jpaged.serve.options import Limits, build_parser, read_flags


def test_server_without_flags_serves_the_model_shipped_with_jpaged_on_localhost():
    flags = read_flags([])
    assert (flags.serve.host, flags.serve.port) == ("127.0.0.1", 8000)
    assert flags.engine == {"verbose": True}
    assert flags.serve.model_names == ("jpaged-tiny",)
    assert flags.serve.api_keys == ()
    assert not flags.serve.share_prefix_cache_across_keys
    assert flags.serve.limits == Limits()
    assert flags.serve.dashboard
    assert not flags.serve.dashboard_text


def parser_flags(*argv: str) -> tuple[bool, str | None, str | None]:
    serve = read_flags(argv).serve
    return serve.enable_auto_tool_choice, serve.tool_call_parser, serve.reasoning_parser


def test_only_the_model_shipped_with_jpaged_has_default_tool_and_reasoning_parsers(tmp_path: Path):
    assert parser_flags() == (True, "hermes", "qwen3")
    assert parser_flags("--reasoning-parser", "deepseek_r1") == (True, "hermes", "deepseek_r1")
    assert parser_flags("--model", "org/name") == (False, None, None)
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}", encoding="utf-8")
    assert parser_flags("--chat-template", str(path)) == (False, None, None)


def test_vllm_flags_map_to_engine_and_server_options():
    flags = read_flags(
        [
            *("--model", "org/name", "--host", "0.0.0.0", "--port", "9", "--api-key", "a", "b"),
            *("--served-model-name", "x", "y", "--dtype", "bfloat16", "--max-model-len", "4096"),
            *("--gpu-memory-utilization", "0.8", "--block-size", "32"),
            *("--no-enable-prefix-caching", "--max-num-seqs", "64"),
            *("--max-num-batched-tokens", "2048", "--scheduling-policy", "priority"),
            *("--swap-space", "2", "--preemption-mode", "auto", "--tensor-parallel-size", "2"),
            *("--seed", "3", "--load-format", "dummy", "--kv-cache-memory-bytes", "1G"),
            *("--max-num-queued-reqs", "5", "--shutdown-timeout", "60", "--no-async-scheduling"),
            "--share-prefix-cache-across-keys",
        ]
    )
    assert flags.engine == {
        "model": "org/name",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.8,
        "block_size": 32,
        "enable_prefix_caching": False,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "scheduling_policy": "priority",
        "swap_space": 2.0,
        "preemption_mode": "auto",
        "tensor_parallel_size": 2,
        "seed": 3,
        "load_format": "dummy",
        "kv_cache_memory_bytes": 2**30,
        "async_scheduling": False,
        "verbose": True,
    }
    assert flags.serve.model_names == ("x", "y")
    assert flags.serve.api_keys == ("a", "b")
    assert flags.serve.share_prefix_cache_across_keys
    assert flags.serve.limits.max_num_queued_reqs == 5
    assert flags.serve.shutdown_timeout == 60


def test_positional_model_and_repeated_api_keys_are_accepted():
    flags = read_flags(["org/name", "--api-key", "a", "--api-key", "b"])
    assert flags.engine["model"] == "org/name"
    assert flags.serve.model_names == ("org/name",)
    assert flags.serve.api_keys == ("a", "b")


def test_model_folder_is_served_under_its_base_name(tmp_path: Path):
    folder = tmp_path / "my-model"
    flags = read_flags(["--model", str(folder)])
    assert flags.serve.model_names == ("my-model",)


def test_flags_set_the_chat_template_and_the_variables_that_clients_may_set(tmp_path: Path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}", encoding="utf-8")
    flags = read_flags(
        ["--chat-template", str(path), "--allowed-chat-template-kwargs", "mood", "tone"]
    )
    assert flags.serve.chat_template == "{{ messages }}"
    assert flags.serve.template_variables == ("mood", "tone")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--block-size", "257"], ["--block-size", "from 1 to 256"]),
        (["--dtype", "int4"], ["--dtype", "choose one of"]),
        (["--model", "a" * 300], ["File name too long"]),
        (["--max-connections", "99999999999999"], ["--max-connections", "an integer"]),
        (["--gpu-memory-utilization", "2"], ["--gpu-memory-utilization", "use 0.9"]),
        (["--tensor-parallel-size", "9"], ["--tensor-parallel-size", "from 1 to 8"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--max-num-queued-reqs", "-1"], ["--max-num-queued-reqs", "such as 100"]),
        (["--shutdown-timeout", "soon"], ["--shutdown-timeout", "such as 30"]),
        (["--max-body-bytes", "big"], ["--max-body-bytes", "800M"]),
        (["--kv-cache-memory-bytes", "1G", "--num-blocks", "9"], ["not both"]),
        (["--chat-template", "/no/such"], ["--chat-template", "/no/such", "No such file", "Jinja"]),
        (["--chat-template", "/"], ["--chat-template: / ", "not a regular file", "Jinja template"]),
        (["--chat-template", "/dev/zero"], ["--chat-template: /dev/zero", "not a regular file"]),
        (["--chat-template", "a" * 999], ["--chat-template: aaa", "too long"]),
        (["--chat-template", sys.executable], ["--chat-template", "utf-8", "Jinja template"]),
        (["--max-num-seqs", "100000"], ["--max-num-seqs 100000 is out of range", "at most 2048"]),
        (["a", "--model", "b"], ["two models"]),
        (["--api-key", ""], ["--api-key is empty"]),
        (["--api-key", "good", "schlüssel"], ["--api-key (number 2)", "printable ASCII"]),
        (["--api-key", " a"], ["--api-key (number 1)", "no space"]),
        (["--api-key", "a\n"], ["--api-key (number 1)", "no space"]),
        (["--api-key", "a\x07b"], ["--api-key (number 1)", "printable"]),
        (["--max-total-body-bytes", "1M"], ["--max-total-body-bytes", "--max-body-bytes"]),
        (["--max-body-bytes", "-1"], ["--max-body-bytes", "800M"]),
        (["--modle", "x"], ["unknown option --modle: did you mean --model?"]),
        (["--modle=x", "a"], ["unknown option --modle: did you mean --model?"]),
        (["--allowed-hosts", "a", "--prot", "1"], ["unknown option --prot: did you mean --port?"]),
        (["--frobnicate"], ["unknown option --frobnicate: see python -m jpaged.serve --help"]),
        (["--tool-call-parser", "x"], ["--tool-call-parser 'x'", "choose one of"]),
        (["--host", ""], ["--host is empty", "127.0.0.1"]),
        (["--model", ""], ["--model is empty", "omit it"]),
        ([" "], ["--model is empty", "omit it"]),
        (["--served-model-name", ""], ["--served-model-name (number 1)", "printable"]),
        (["--served-model-name", "a", "b\nc"], ["--served-model-name (number 2)", "printable"]),
        (["--served-model-name", " a"], ["--served-model-name", "no space"]),
        (["--max-n", "0"], ["--max-n", "1 or more"]),
        (["--max-prompts", "0"], ["--max-prompts", "1 or more"]),
        (["--max-connections", "0"], ["--max-connections", "1 or more"]),
        (["--max-num-client-reqs", "0"], ["--max-num-client-reqs", "1 or more"]),
        (["--max-body-bytes", "0"], ["--max-body-bytes", "800M"]),
        (["--queue-timeout", "0"], ["--queue-timeout", "seconds above 0"]),
        (["--request-timeout", "0.0"], ["--request-timeout", "seconds above 0"]),
        (["--stall-timeout", "0"], ["--stall-timeout", "seconds above 0"]),
        (["--health-timeout", "0"], ["--health-timeout", "seconds above 0"]),
        (["--hang-timeout", "0"], ["--hang-timeout", "seconds above 0"]),
        (["--allowed-hosts", ""], ["--allowed-hosts", "llm.example.com"]),
        (["--allowed-hosts", "http://a"], ["--allowed-hosts", "llm.example.com"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flag_error_names_the_flag_and_the_remedy(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[Any]
):
    with pytest.raises(SystemExit) as caught:
        read_flags(argv)
    assert caught.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in said


def test_queue_limit_and_shutdown_timeout_may_be_zero():
    flags = read_flags(["--max-num-queued-reqs", "0", "--shutdown-timeout", "0"])
    assert flags.serve.limits.max_num_queued_reqs == 0
    assert flags.serve.shutdown_timeout == 0


def test_help_text_contains_examples_and_important_options():
    text = build_parser().format_help()
    for word in ("curl", "--preemption-mode", "examples:", "SIGTERM", "503", "127.0.0.1"):
        assert word in text


@pytest.mark.parametrize("key", [" secret", "--secret", "-secret"])
def test_api_key_error_does_not_show_the_key(key: str, capsys: pytest.CaptureFixture[Any]):
    with pytest.raises(SystemExit):
        read_flags(["--api-key", key])
    assert "secret" not in capsys.readouterr().err
