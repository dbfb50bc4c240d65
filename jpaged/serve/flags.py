"""The command line: `vllm serve`'s names, checked before anything starts."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged import EngineConfig, __version__
from jpaged.serve.flag_values import (
    check_key,
    check_name,
    count,
    num_bytes,
    positive_bytes,
    positive_count,
    positive_seconds,
    read_host,
    seconds,
)
from jpaged.serve.limits import Limits
from jpaged.serve.serving import ServeConfig

_DESCRIPTION = """\
Serve a language model over OpenAI's HTTP API, its KV cache paged.

With no argument: the small model that comes with jpaged, on http://127.0.0.1:8000, for this machine
only. Look at http://127.0.0.1:8000/ to see the blocks, or ask:

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "Count from 1 to 20", "max_tokens": 100, "temperature": 0}'
"""
_EXAMPLES = """\
examples:
  python -m jpaged.serve --model Qwen/Qwen3-0.6B --port 9000
  python -m jpaged.serve --model ./llama --served-model-name llama --host 0.0.0.0 --api-key SECRET
  python -m jpaged.serve --preemption-mode auto --swap-space 16 --scheduling-policy priority

SIGTERM or Ctrl-C: no new requests, those in flight end within --shutdown-timeout; a second signal
ends the server at once.
"""
_EMBEDDED_NAME = "jpaged-tiny"


@dataclass(frozen=True)
class Flags:
    """What the command line asks.

    Attributes:
        host, port: Where to listen.
        engine: Options of `Engine`.
        serve: How to present it.
        shutdown_timeout: Seconds for requests in flight to end.
        log_requests: Whether each request is a line of the log.
    """

    host: str
    port: int
    engine: dict[str, Any]
    serve: ServeConfig
    shutdown_timeout: float
    log_requests: bool


_ENGINE_FLAGS = (
    "model",
    "dtype",
    "load_format",
    "max_model_len",
    "seed",
    "block_size",
    "num_blocks",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "preemption_mode",
    "swap_space",
    "async_scheduling",
    "num_scheduler_steps",
    "compilation_cache_dir",
    "num_compile_workers",
)


def build_parser() -> argparse.ArgumentParser:
    """The command line, with its help."""
    parser = argparse.ArgumentParser(
        prog="python -m jpaged.serve",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--version", action="version", version=f"jpaged {__version__}")
    _add_server_flags(parser.add_argument_group("the server"))
    _add_limit_flags(parser.add_argument_group("limits (what is refused, and when)"))
    _add_model_flags(parser.add_argument_group("the model"))
    _add_memory_flags(parser.add_argument_group("the paged KV cache"))
    _add_step_flags(parser.add_argument_group("the steps"))
    return parser


def _add_server_flags(group: Any) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="port to listen at (8000; 0: a free one)")
    add("--api-key", nargs="+", action="extend", metavar="KEY", help="requests need one of these")
    add(
        "--share-prefix-cache-across-keys",
        action="store_true",
        help="let keys find each other's cached prefixes, and so tell what the others asked",
    )
    add(
        "--allowed-hosts",
        nargs="+",
        action="extend",
        type=read_host,
        metavar="NAME",
        help="names besides this machine's own by which it may be asked, * for any (default: any "
        "with --api-key or where others can reach the --host, else none)",
    )
    add(
        "--served-model-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="what clients may call the model (default: as --model); one or several",
    )
    add("--shutdown-timeout", type=seconds, default=30.0, metavar="S", help="to drain (30 s)")
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the model's")
    add(
        "--allowed-chat-template-kwargs",
        nargs="*",
        metavar="NAME",
        help="what clients may set of the template (enable_thinking thinking)",
    )
    add(
        "--allow-special-tokens-in-messages",
        action="store_true",
        help="text such as <|im_end|> in a message is the token, as which it can end the message",
    )
    add("--no-dashboard", action="store_true", help="no picture of the memory at /")
    add("--dashboard-show-text", action="store_true", help="prompts and answers in the picture")
    add("--no-log-requests", action="store_true", help="no line in the log for each request")


def _add_limit_flags(group: Any) -> None:
    add, own = group.add_argument, Limits()
    add(
        "--max-num-queued-reqs",
        type=count,
        default=own.max_num_queued_reqs,
        metavar="N",
        help=f"503 for whoever would wait behind so many sequences ({own.max_num_queued_reqs})",
    )
    add(
        "--max-num-client-reqs",
        type=positive_count,
        metavar="N",
        help="429 for a client (an API key; without keys an address) with so many in flight",
    )
    add(
        "--max-body-bytes",
        type=positive_bytes,
        default=own.max_body_bytes,
        metavar="BYTES",
        help="413 for a larger body, such as 8M (the default)",
    )
    add(
        "--max-body-values",
        type=count,
        default=own.max_body_values,
        metavar="N",
        help="400 for a body of more JSON values; strings, fractions, arrays and objects are four "
        f"({own.max_body_values}, or what a prompt of --max-model-len token ids needs)",
    )
    add(
        "--max-total-body-bytes",
        type=positive_bytes,
        default=own.max_total_body_bytes,
        metavar="BYTES",
        help="503 when the bodies of all requests in flight would be larger together (1G)",
    )
    for name, meaning in (
        ("max_prompts", "prompts in a request"),
        ("max_n", "answers to a prompt: n, best_of, beams"),
        ("max_connections", "open connections"),
    ):
        default = getattr(own, name)
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=positive_count, default=default, metavar="N", help=f"{meaning} ({default})")
    for name, meaning in (
        ("queue_timeout", "until the first token"),
        ("request_timeout", "for a request in all"),
        ("stall_timeout", "that a client may leave an answer unread"),
        ("text_timeout", "to tokenise a prompt, its chat template included"),
        ("health_timeout", "without a turn of the loop until /health is red"),
    ):
        default = getattr(own, name)
        flag = f"--{name.replace('_', '-')}"
        meaning = f"{meaning} ({default:g} s)"
        add(flag, type=positive_seconds, default=default, metavar="S", help=meaning)


def _add_model_flags(group: Any) -> None:
    add = group.add_argument
    add("--model", help="a folder, or a hub id as Qwen/Qwen3-0.6B (default: the embedded model)")
    add("--dtype", help="auto (default), float32, bfloat16 or float16")
    add("--load-format", help="auto (default), safetensors, or dummy for random weights")
    add("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer")
    add("--seed", type=int, metavar="N", help="of requests that bring none (0)")


def _add_memory_flags(group: Any) -> None:
    add = group.add_argument
    add("--block-size", type=int, metavar="N", help="tokens in a block, 1 to 256 (16)")
    add("--num-blocks", type=int, metavar="N", help="blocks in the pool (default: what fits)")
    add("--kv-cache-memory-bytes", type=num_bytes, metavar="BYTES", help="or their bytes: 20G")
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="F",
        help="share of the device's memory to use in all (0.9)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share the KV of common prefixes (on)",
    )
    add("--preemption-mode", help="for KV that must make room: recompute (default), swap or auto")
    add("--swap-space", type=float, metavar="GIB", help="host memory for swapped KV (4)")


def _add_step_flags(group: Any) -> None:
    add = group.add_argument
    add("--max-num-seqs", type=int, metavar="N", help="most sequences in a step")
    add("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step")
    add("--scheduling-policy", help="fcfs (default), or priority: lower numbers first")
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="the host plans ahead of the device (on)",
    )
    add(
        "--num-scheduler-steps",
        type=int,
        metavar="N",
        help="decode steps in one launch while few requests run (GPU 4; 1: never)",
    )
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="1: one device, so far")
    add("--compilation-cache-dir", metavar="FOLDER", help="JAX's cache of compiled programs")
    add(
        "--num-compile-workers",
        type=int,
        metavar="N",
        help="processes that compile beside the engine's at a first start (0: none)",
    )


def read_flags(argv: Sequence[str] | None = None) -> Flags:
    """The command line `argv` (default: the process's); mistakes end the process with code 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return _flags(args)
    except (TypeError, ValueError, OSError) as error:
        parser.error(_with_flag_names(str(error)))


def _flags(args: argparse.Namespace) -> Flags:
    if args.model_tag is not None and args.model not in (None, args.model_tag):
        raise ValueError(f"two models are named: {args.model_tag} and --model {args.model}")
    args.model = args.model_tag if args.model is None else args.model
    if args.model is not None and not args.model.strip():
        raise ValueError(
            "model= is empty: give a folder or a hub id, or leave it out for the embedded model"
        )
    if not args.host.strip():
        raise ValueError(
            "host= is empty: give the address to listen at, 127.0.0.1 for this machine only or "
            "0.0.0.0 for all that can reach it"
        )
    if args.tensor_parallel_size != 1:
        size = args.tensor_parallel_size
        raise ValueError(f"tensor_parallel_size={size} is not supported yet: leave it at 1")
    if args.max_total_body_bytes < args.max_body_bytes:
        raise ValueError(
            f"max_total_body_bytes={args.max_total_body_bytes} is less than --max-body-bytes "
            f"{args.max_body_bytes}, which one body may have: raise it"
        )
    for number, key in enumerate(args.api_key or (), 1):
        check_key(key, number)
    if not 0 <= args.port < 2**16:
        raise ValueError(f"port={args.port} is no port: give 0 to 65535")
    given = {name: getattr(args, name) for name in _ENGINE_FLAGS}
    engine = {name: value for name, value in given.items() if value is not None}
    EngineConfig.from_options(args.model, {k: v for k, v in engine.items() if k != "model"})
    return Flags(
        host=args.host,
        port=args.port,
        engine=engine | {"verbose": True},
        serve=_serve_config(args),
        shutdown_timeout=args.shutdown_timeout,
        log_requests=not args.no_log_requests,
    )


def _serve_config(args: argparse.Namespace) -> ServeConfig:
    template = args.chat_template
    allowed = args.allowed_chat_template_kwargs
    limits = Limits(
        **{name: getattr(args, name) for name in Limits.__dataclass_fields__ if hasattr(args, name)}
    )
    own = ServeConfig()
    names = tuple(args.served_model_name or [_name_of(args.model)])
    for number, name in enumerate(names, 1):
        check_name(name, number)
    return ServeConfig(
        model_names=names,
        api_keys=tuple(args.api_key or ()),
        share_prefix_cache_across_keys=args.share_prefix_cache_across_keys,
        allowed_hosts=None if args.allowed_hosts is None else tuple(args.allowed_hosts),
        limits=limits,
        chat_template=None if template is None else _read_template(template),
        template_variables=own.template_variables if allowed is None else frozenset(allowed),
        allow_special_tokens=args.allow_special_tokens_in_messages,
        dashboard=not args.no_dashboard,
        dashboard_text=args.dashboard_show_text,
    )


def _read_template(given: str) -> str:
    """The template in a file; ValueError names the flag."""
    path = Path(given)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("no regular file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        message = f"chat_template={given} cannot be read ({why}): give a file with a Jinja template"
        raise ValueError(message) from error


def _name_of(model: str | None) -> str:
    """A hub id as it is; of a folder the last part, for paths are nobody's business."""
    if model is None:
        return _EMBEDDED_NAME
    path = Path(model)
    return path.resolve().name if path.is_dir() or path.is_absolute() else model


def _with_flag_names(message: str) -> str:
    """An option's name as it is written on the command line."""
    name, equals, rest = message.partition("=")
    is_flag = equals and name.replace("_", "").isalpha()
    return f"--{name.replace('_', '-')} {rest.lstrip()}" if is_flag else message
