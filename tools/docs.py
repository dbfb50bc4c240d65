"""Build the documentation site, and write the pages that are generated from the code.

    python -m tools.docs             exit with code 1 if a generated page is not current
    python -m tools.docs --write     write docs/flags.md and docs/models.md
    python -m tools.docs --site DIR  build the site into DIR (pip install -e ".[docs]")

Pages of the repository's root become pages of the site. Links to source files become plain text,
because the site contains no source files.
"""

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from jpaged.models.quantization import QUANTIZATION_METHODS
from jpaged.models.registry import SUPPORTED_MODEL_TYPES
from jpaged.serve.options import build_parser
from pallas_kernels import supports_fp8, supports_kernels
from pallas_kernels.tuning import has_tuned_table, is_hopper

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

ROOT_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "jpaged/assets/tiny/MODEL_CARD.md": "embedded_model.md",
}
"""Maps each page outside docs/ to the path of the page in the site."""

MODELS = {
    "gpt2": "GPT-2",
    "opt": "OPT",
    "llama": "LLaMA 2, Llama 3, 3.1 and 3.2, and models with their architecture",
    "mistral": "Mistral 7B and its successors",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3 (dense)",
    "qwen3_moe": "Qwen3 with experts, such as Qwen3-30B-A3B",
    "mixtral": "Mixtral 8x7B and 8x22B",
    "olmoe": "OLMoE 1B-7B",
    "gemma3_text": "Gemma 3 (270M, 1B)",
    "gemma3": "Gemma 3 (4B, 12B, 27B), text only",
}
"""Names of the models that have each `model_type`."""

QUANTIZATIONS = {
    "compressed-tensors": "FP8 of llm-compressor: per tensor or per channel, static or dynamic",
    "fp8": "FP8 in blocks of 128 x 128, AutoFP8; also FP8 from bf16 weights while loading",
    "modelopt": "FP8 of NVIDIA ModelOpt, per tensor",
}
"""Description of each value of `--quantization`."""

GPUS = {
    "NVIDIA T4": "7.5",
    "NVIDIA A100": "8.0",
    "NVIDIA RTX A6000": "8.6",
    "NVIDIA L4": "8.9",
    "NVIDIA H100": "9.0",
    "NVIDIA H200": "9.0",
    "NVIDIA B200": "10.0",
}
"""Maps the name of one GPU of each generation to the GPU's compute capability."""

MEASURED_GPUS = ("NVIDIA H100", "NVIDIA H200")
"""GPUs on which the benchmarks and the tests marked `gpu` ran."""

_LINK = re.compile(r"(!?)\[((?:[^\][]|\[[^\][]*\])*)\]\(([^()\s]+)\)")
_EXTERNAL_LINK = re.compile(r"[a-z][a-z0-9+.-]*:|#")
_NOTE = "<!-- Written by `python -m tools.docs --write`. Do not edit. -->\n"


def flags_page() -> str:
    """Return the page with all flags of the server by group, read from the argument parser."""
    parts = [
        "# Flags of the server\n",
        "This page lists every flag of `jpaged serve` (or `python -m jpaged.serve`) for people who "
        "configure a server. Flags of `vllm serve` keep their names. A default is in "
        "parentheses. The options of `Engine` have the same names with underscores.\n",
    ]
    for group in build_parser()._action_groups:
        actions = [it for it in group._group_actions if it.option_strings and it.dest != "help"]
        if not actions or group.title == "options":
            continue
        parts.append(f"## {str(group.title).capitalize()}\n")
        rows = [(_flag_text(action), _cell(action.help or "")) for action in actions]
        parts.append(_table(("flag", "meaning"), rows))
    return _NOTE + "\n".join(parts)


def _flag_text(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.choices:
        return names + " " + ", ".join(f"`{choice}`" for choice in action.choices)
    return f"{names} `{action.metavar}`" if isinstance(action.metavar, str) else names


def models_page() -> str:
    """Return the page about supported models, weight formats and GPUs."""
    models = [(f"`{it}`", MODELS[it]) for it in SUPPORTED_MODEL_TYPES]
    quantizations = [(f"`{it}`", QUANTIZATIONS[it]) for it in QUANTIZATION_METHODS]
    return _NOTE + "\n".join(
        (
            "# Supported models and GPUs\n",
            "This page says which checkpoints and which devices jpaged runs, for people who choose "
            "either. jpaged refuses any other model or setting before it reads the weights, with "
            "an error that names the field.\n",
            "## Models\n",
            "The `model_type` is a field of the checkpoint's `config.json`. Every feature of "
            "jpaged works with every family: prefix caching, samples and beams, swapping, "
            "structured outputs, FP8 weights, an FP8 KV cache, and tensor parallelism. There is "
            "one exception: experts have no static scales of activations.\n",
            _table(("`model_type`", "models"), models),
            "Heads have 1 to 256 elements on a GPU, and any number on a CPU. Sizes that are no "
            "power of two take the time of the next power of two.\n",
            "Rotary embeddings have the types `default`, `linear`, `llama3` and `yarn`. With "
            "`yarn`, a model has `original_max_position_embeddings` times `factor` positions, or "
            "`max_position_embeddings` if that is more.\n",
            "Every chosen expert computes its tokens: experts have no capacity limit. On a "
            "GPU, [kernels](kernels/experts.md) compute the experts: kernels for Hopper GPUs if "
            "the weights have 2 bytes and the sizes are multiples of 64, else portable "
            "ones. Experts in FP8 have kernels for GPUs with FP8 support. On "
            "several devices, each device holds a shard of the width of every expert, or whole "
            "experts with `--enable-expert-parallel`. Use the option if the devices cannot split "
            "the width of an expert, or "
            "[if it is faster](kernels/experts.md#tensor-parallel-or-expert-parallel).\n",
            "Not supported: image inputs, LoRA, embeddings ([the list](from_vllm.md)).\n",
            "## Weight formats\n",
            "Weights in bfloat16, float16 and float32 are safetensors. Quantized checkpoints name "
            "their method in `config.json`; [FP8](fp8.md) has the details.\n",
            _table(("`--quantization`", "checkpoints"), quantizations),
            "## Devices\n",
            "The GPU's compute capability decides which kernels run. For a GPU that is not in this "
            "table, run `jpaged doctor`.\n",
            _table(
                ("device", "compute capability", "kernels", "FP8", "tuned", "tested and measured"),
                [_device_row(kind, capability) for kind, capability in GPUS.items()]
                + [("CPU", "", "plain XLA", "emulated", "", "yes, for tests")],
            ),
        )
    )


def _device_row(kind: str, capability: str) -> tuple[str, ...]:
    device = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=kind)
    if not supports_kernels(device):
        return kind, capability, "none: refused", "", "", ""
    kernels = "Mosaic GPU and Triton" if is_hopper(kind) else "Triton"
    yes_no = {True: "yes", False: "no"}
    measured = yes_no[kind in MEASURED_GPUS]
    return (
        kind,
        capability,
        kernels,
        yes_no[supports_fp8(device)],
        yes_no[has_tuned_table(kind)],
        measured,
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    """Return a help text as the text of a Markdown table cell."""
    return re.sub(
        r"[|<>*]", lambda found: f"\\{found[0]}", " ".join(text.replace("%%", "%").split())
    )


PAGES = {"flags.md": flags_page, "models.md": models_page}


def build_site(site: Path) -> None:
    """Build the site into the folder `site`.

    Raises:
        ValueError: The navigation in mkdocs.yml lacks a page, or names a page that is missing.
        subprocess.CalledProcessError: A link is broken.
    """
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        write_sources(sources / "docs")
        shutil.copy(ROOT / "mkdocs.yml", sources)
        check_navigation(sources)
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=sources, check=True, env=environment)
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(sources / "site", site)


def check_navigation(sources: Path) -> None:
    """Raise ValueError unless the navigation lists exactly the pages of the site.

    Decision records need no entry: `decisions_page` lists them.
    """
    named = set(re.findall(r"^ +- .+: (\S+\.md)$", (sources / "mkdocs.yml").read_text(), re.M))
    docs = sources / "docs"
    pages = {file.relative_to(docs).as_posix() for file in docs.rglob("*.md")}
    pages = {page for page in pages if not page.startswith("decisions/")}
    if named != pages:
        raise ValueError(
            f"mkdocs.yml: pages that are missing: {sorted(named - pages)}; pages without an entry "
            f"in nav: {sorted(pages - named)}"
        )


def write_sources(folder: Path) -> None:
    """Write the sources of the site: docs/, the pages of `ROOT_PAGES` and the decision list."""
    shutil.copytree(DOCS, folder)
    for file in folder.rglob("*.md"):
        page = file.relative_to(folder).as_posix()
        file.write_text(rewrite_links(file.read_text(encoding="utf-8"), f"docs/{page}", page))
    for source, page in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        (folder / page).write_text(rewrite_links(text, source, page))
    (folder / "decisions.md").write_text(decisions_page())


def rewrite_links(markdown: str, source: str, page: str) -> str:
    """Return the text of a page, with links changed so that they are valid in the site.

    Args:
        markdown: Text of the page.
        source: Path of the page in the repository.
        page: Path of the page in the site.
    """

    def rewrite(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if _EXTERNAL_LINK.match(target):
            return found[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if path in ROOT_PAGES:
            path = ROOT_PAGES[path]
        elif path == "docs/decisions":
            path = "decisions.md"
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        elif (ROOT / path).exists():
            return text if "`" in text else f"`{path}`" if text == path else f"{text} (`{path}`)"
        else:
            # Leave a broken link unchanged: the strict build of the site reports it.
            return found[0]
        relative = posixpath.relpath(path, posixpath.dirname(page) or ".")
        return f"{mark}[{text}]({relative}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(rewrite, markdown)


def decisions_page() -> str:
    """Return the page that lists the decision records."""
    lines = [
        "# Decisions\n",
        "These records say why jpaged is built the way it is, for people who change it. Each has "
        "the context, the decision and its consequences.\n",
    ]
    for file in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}](decisions/{file.name})")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the pages, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the pages")
    parser.add_argument("--site", type=Path, metavar="DIR", help="build the site into DIR")
    args = parser.parse_args()
    if args.site is not None:
        try:
            build_site(args.site)
        except (ValueError, subprocess.CalledProcessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    stale = []
    for name, make_page in PAGES.items():
        file, text = DOCS / name, make_page()
        if args.write:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"not current: {', '.join(stale)}: run python -m tools.docs --write", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
