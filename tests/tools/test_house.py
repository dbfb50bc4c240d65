"""Test the import structure: no cycles, no upward imports and few files outside packages."""

import re
from pathlib import Path

import pytest

from tools import house

MAX_TOP_LEVEL_FILES, MAX_PRIVATE_ACCESSES = 8, 10
MAX_CHAIN, MAX_STEP_FUNCTIONS, MAX_STEP_MODULES = 8, 60, 15


@pytest.fixture(scope="module")
def imports() -> set[house.Import]:
    return house.find_imports(house.module_files())


def write_package(root: Path, files: dict[str, str]) -> set[house.Import]:
    """Write the files, and return the imports that `house.find_imports` finds between them."""
    for name, code in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return house.find_imports(house.module_files(root))


def test_folders_and_files_have_no_import_cycles_or_upward_imports(imports: set[house.Import]):
    assert house.import_cycles(house.component_graph(imports, typed=False)) == []
    assert house.import_cycles(house.file_graph(imports)) == []
    assert house.upward_imports(imports) == []


def test_few_files_are_directly_in_the_package():
    assert len(house.top_level_files()) <= MAX_TOP_LEVEL_FILES


def test_tests_use_few_private_names():
    found = house.private_accesses(house.module_files())
    assert len(found) <= MAX_PRIVATE_ACCESSES, found


def test_private_names_in_tests_are_counted(tmp_path: Path):
    code = "class A:\n    def _f(self):\n        self._x = 1\ndef _g(): ...\n"
    uses = "from jpaged.text.a import A, _g\na = A()\nsetattr(A, '_f', a._x)\na._y, f'{a}_f'\n"
    own = "class B(A):\n    def _f(self):\n        super()._f()\n        self._x\n"
    write_package(tmp_path, {"jpaged/text/a.py": code, "tests/test_a.py": uses + own})
    found = house.private_accesses(house.module_files(tmp_path), tmp_path)
    assert sorted(found) == [f"tests/test_a.py:{it}" for it in ("1: _g", "3: _f", "3: _x")]


def test_import_cycles_and_upward_imports_are_found(tmp_path: Path):
    found = write_package(
        tmp_path,
        {
            "jpaged/__init__.py": '_EXPORTS = {"jpaged.engine.engine": ("Engine",)}\n',
            "jpaged/core/plan.py": "def late():\n    from jpaged.runtime.batch import pack\n",
            "jpaged/runtime/batch.py": "import jpaged.core.plan\n",
            "jpaged/engine/engine.py": "from jpaged.runtime import batch\n",
            "jpaged/serve/http/app.py": "from jpaged import Engine\n",
        },
    )
    graph = house.component_graph(found, typed=True)
    expected = {"core": "runtime", "runtime": "core", "engine": "runtime", "serve": "engine"}
    assert graph == {importer: {imported} for importer, imported in expected.items()}
    assert house.import_cycles(graph) == [["core", "runtime"]]
    assert house.import_cycles(house.file_graph(found)) == [
        ["jpaged.core.plan", "jpaged.runtime.batch"]
    ]
    assert [it.importer for it in house.upward_imports(found)] == ["jpaged.core.plan"]
    assert house.longest_chain(graph) == 3


def test_type_checking_imports_do_not_count_as_import_cycles(tmp_path: Path):
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jpaged.text.b\n"
    found = write_package(
        tmp_path, {"jpaged/text/a.py": typed, "jpaged/text/b.py": "import jpaged.text.a"}
    )
    assert len(found) == 2
    assert house.import_cycles(house.file_graph(found)) == []


def test_longest_import_chain_is_short(imports: set[house.Import]):
    assert house.longest_chain(house.component_graph(imports, typed=True)) <= MAX_CHAIN


def test_decode_step_calls_few_functions():
    step = house.trace_step()
    assert {"jpaged.engine.loop", "jpaged.runtime.model_runner"} <= step.modules
    assert len(step.modules) <= len(step.functions) <= step.num_calls
    assert len(step.functions) <= MAX_STEP_FUNCTIONS
    assert len(step.modules) <= MAX_STEP_MODULES


def test_benchmarks_import_nothing_from_tools():
    imported = re.compile(r"^\s*(?:from|import) tools\b", re.MULTILINE)
    files = (house.ROOT / "bench").rglob("*.py")
    assert [file.name for file in files if imported.search(file.read_text("utf-8"))] == []
