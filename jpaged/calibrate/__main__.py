"""`python -m jpaged.calibrate MODEL TEXT FOLDER`: scales for a KV cache in FP8.

Runs a text through the model and takes the largest absolute key and value of each layer, over 448,
as the scales, rounded up to powers of 2. With such scales only those numbers are stored otherwise
than with 1 that are too large for FP8, or so small that it has them with fewer bits.

FOLDER gets them in a small safetensors file, links to the checkpoint's own files, and a config.json
whose `kv_cache_scheme` tells of the scales, as compressed-tensors writes it. It is then loaded with
`kv_cache_dtype="fp8"`. Exit codes: 0, 1 for an error, 2 for a mistake in the command line.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jpaged.options import CommandLine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code."""
    parser = CommandLine(prog="jpaged.calibrate", description=__doc__)
    parser.add_argument("model", help="checkpoint folder or Hugging Face id")
    parser.add_argument("text", type=Path, help="a text file such as the model will see, in UTF-8")
    parser.add_argument("folder", type=Path, help="what to write; new, or empty")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="of the weights (auto)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (2048)")
    args = parser.parse_args(argv)
    # Loading these takes a while, which the help does without.
    from jpaged.models.checkpoint import check_model
    from jpaged.terminal.session import format_error

    try:
        check_model(args.model)
        text = args.text.read_text(encoding="utf-8")
        from jpaged.calibrate.scales import calibrate  # imports JAX

        options = {"dtype": args.dtype, "length": args.length}
        scales = calibrate(args.model, text, args.folder, **options)
    except (ValueError, OSError) as error:
        print(f"error: {format_error(error)}", file=sys.stderr)
        return 1
    for layer, (k, v) in scales.items():
        print(f"{layer}: k_scale {k:.3g}, v_scale {v:.3g}")
    print(f'written to {args.folder}: load it with kv_cache_dtype="fp8"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
