"""Whichever test files are named, in whatever order, pytest must find the module each one means."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
NAMES = {file.stem for file in FILES}


def imported(source: Path) -> Iterator[str]:
    """Top-level names of the modules that a file imports."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_no_two_test_modules_share_a_name():
    counts = Counter(file.name for file in FILES if file.name != "conftest.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_each_file_imports_helpers_of_its_own_folder_and_never_a_conftest():
    """pytest puts the folder of each collected file, and of each conftest.py above it, on the path.
    What lies in another folder is found only if a file there is collected too, and `conftest` is
    whichever was loaded first."""
    wrong = [
        f"{file.relative_to(TESTS)} imports {name}"
        for file in FILES
        for name in imported(file)
        if (
            name in NAMES
            and not (file.parent / f"{name}.py").is_file()
            and not (TESTS / f"{name}.py").is_file()
        )
        or name == "conftest"
    ]
    assert wrong == []
