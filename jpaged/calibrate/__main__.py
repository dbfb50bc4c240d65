"""Compute the FP8 scales of a KV cache: `jpaged calibrate MODEL TEXT FOLDER`.

The command runs a text through the model and finds the largest absolute key and value of each
layer. A scale is this number divided by 448 and rounded up to a power of 2. Compared with scale 1,
a power of 2 changes the stored form of only two kinds of numbers: numbers that are too large for
FP8, and numbers so small that FP8 stores them with fewer bits.

The command writes a checkpoint to FOLDER: a small safetensors file with the scales, links to the
files of the original checkpoint, and a config.json whose `kv_cache_scheme` describes the scales in
the format of compressed-tensors. Load FOLDER with `kv_cache_dtype="fp8"`.

Exit codes: 0 for success, 1 for an error, 2 for a wrong command line.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jpaged.options import CommandLine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: Command-line arguments; None for the arguments of the process.
    """
    parser = CommandLine(prog="jpaged calibrate", description=__doc__)
    parser.add_argument("model", help="checkpoint folder or Hugging Face id")
    parser.add_argument("text", type=Path, help="UTF-8 text file, similar to later prompts")
    parser.add_argument("folder", type=Path, help="output folder, new or empty")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument(
        "--dtype", default="auto", choices=dtypes, help="dtype of the weights (auto)"
    )
    parser.add_argument(
        "--length", type=int, default=2048, help="maximum number of tokens in a sequence (2048)"
    )
    args = parser.parse_args(argv)
    # Import these modules here: the imports are slow, and --help works without them.
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
    print(f'wrote {args.folder}: load it with kv_cache_dtype="fp8"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
