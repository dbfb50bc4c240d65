"""Test that the documentation agrees with the code, and that its commands and programs run."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from bench.serving import build_parser as bench_parser
from jpaged import EngineStats, SamplingParams
from jpaged.__main__ import build_parser as command_parser
from jpaged.serve.dashboard.broadcast import MAX_VIEWERS
from jpaged.serve.engine.messages import EngineRequest
from jpaged.serve.http.access import UNAUTHENTICATED_PATHS
from jpaged.serve.http.connections import HEADER_TIMEOUT_S, NUM_SPARE_CONNECTIONS
from jpaged.serve.http.metrics import Metrics
from jpaged.serve.options import Limits, build_parser
from tools import docs

ROOT = Path(__file__).parents[1]
MONITORING = ROOT / "examples" / "monitoring"
OPERATE = ("operators", "limits", "metrics", "security", "sizing", "upgrades", "docker")
OPERATE += ("kubernetes", "replicas", "quickstart", "installation", "troubleshooting")
METRIC = re.compile(r"\b(?:vllm|jpaged):(?!cpu|cuda)\w+")
FOREIGN_FLAGS = {"--gpus", "--rm", "--target", "--time", "--shm-size"}  # flags of docker
FOREIGN_FLAGS |= {"--model_args", "--tasks"}  # flags of lm-eval


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def test_reproducibility_page_names_tests_that_exist():
    named = set(re.findall(r"`(test_\w+)`", page("reproducibility")))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "e2e").glob("*.py")]
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(sources), re.M))
    assert named
    assert named <= defined


@pytest.mark.parametrize("name", docs.PAGES)
def test_generated_docs_page_is_up_to_date(name: str):
    text = (docs.DOCS / name).read_text(encoding="utf-8")
    assert text == docs.PAGES[name](), "run python -m tools.docs --write"


def test_command_line_flags_in_the_docs_exist():
    known = {
        flag
        for parser in (build_parser(), command_parser(), bench_parser())
        for action in parser._actions
        for flag in action.option_strings
    }
    # Read the example instead of importing it, because it needs Ray.
    example = (ROOT / "examples" / "ray_serve.py").read_text(encoding="utf-8")
    of_example = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', example))
    known |= {"--json", *of_example, *FOREIGN_FLAGS}
    named = {
        flag for name in OPERATE for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", page(name))
    }
    assert len(named) > 30
    assert of_example <= named <= known


def test_metrics_in_docs_and_monitoring_files_exist():
    stats = EngineStats(16, 8, 8, 0)
    metrics = Metrics("m", max_model_len=64, block_size=16, num_blocks=9)
    metrics.record_request(EngineRequest("r", [1], SamplingParams(max_tokens=2)), "stop", 1, 1)
    text = metrics.text(stats).decode()
    files = [*MONITORING.iterdir(), *(ROOT / "docs").glob("*.md")]
    named = {name for file in files for name in METRIC.findall(file.read_text())}
    assert len(named) > 20
    for name in named:
        assert re.search(rf"^{name}(?:_count)?{{", text, re.M), name


def test_grafana_dashboard_queries_the_same_metrics_as_the_alerts():
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = (MONITORING / "alerts.yaml").read_text()
    for name in set(METRIC.findall(alerts)):
        assert any(name in query for query in queries), name


def test_limits_in_the_docs_have_the_values_of_the_code():
    text = page("limits")
    assert f"| dashboard viewers | {MAX_VIEWERS} pages |" in text
    assert f"answers on up to {NUM_SPARE_CONNECTIONS} connections above the limit" in text
    assert f"| time for the headers | {HEADER_TIMEOUT_S:.0f} s |" in text
    assert f"after the headers | {Limits().body_timeout:.0f} s |" in text
    assert f"default of {Limits().max_body_values:,} values" in text
    assert all(f"`{path}`" in page("security") for path in UNAUTHENTICATED_PATHS)


def test_messages_on_the_troubleshooting_page_exist_in_the_code():
    constants = [
        node.value
        for folder in ("jpaged", "pallas_kernels")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    quoted = re.findall(r"^### `([^`]+)`", page("troubleshooting"), re.M)
    assert len(quoted) > 8
    for message in quoted:
        if message.startswith("XlaRuntimeError"):
            continue
        for part in message.split("..."):
            words = part.strip(" (")
            assert any(words in constant for constant in constants), message


@pytest.mark.full
def test_site_builds_without_warnings(tmp_path: Path):
    command = [sys.executable, "-m", "tools.docs", "--site", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jpaged.engine.engine.Engine.generate" in (
        tmp_path / "site" / "python_api" / "index.html"
    ).read_text(encoding="utf-8")


PROGRAMS = [
    pytest.param(program, id=f"{name}-{index}")
    for name in ("quickstart", "recipes", "your_model")
    for index, program in enumerate(code_blocks(page(name), "python"))
]


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_in_the_docs_runs(program: str):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


@pytest.mark.full
def test_commands_of_the_quickstart_run():
    commands = [
        line
        for block in code_blocks(page("quickstart"), "bash")
        for line in block.splitlines()
        if line.startswith(("jpaged ", "curl "))
    ]
    server: subprocess.Popen[bytes] | None = None
    try:
        for command in commands:
            words = shlex.split(command)
            if words[0] == "jpaged":
                words[:1] = [sys.executable, "-m", "jpaged"]
            if words[3:4] == ["serve"]:
                server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
                wait_until_ready("http://127.0.0.1:8000/ready")
            elif "--model" not in words:  # a model of the hub
                done = subprocess.run(words, capture_output=True, text=True, timeout=120)
                assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0


def wait_until_ready(url: str) -> None:
    """Wait until a server answers with 200."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"{url} did not answer")


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    return folder


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suffix", [".whl", ".tar.gz"])
def test_distribution_installs_into_an_empty_environment(
    suffix: str, distribution: Path, tmp_path: Path
):
    (package,) = distribution.glob(f"*{suffix}")
    venv, bare = tmp_path / "venv", {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    bare |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    install = ["sh", str(ROOT / "docker" / "install.sh"), str(venv), str(package)]
    subprocess.run(install, check=True, capture_output=True, timeout=600, env=bare, cwd=tmp_path)
    command = [str(venv / "bin" / "jpaged"), "Count from 1 to 5"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=bare, cwd=tmp_path
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1, 2, 3, 4, 5"), done.stderr
