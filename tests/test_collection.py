"""Test that imports of test helpers work, no matter which test files pytest collects."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
NAMES = {file.stem for file in FILES}


def imported_names(source: Path) -> Iterator[str]:
    """Yield the top-level names of the modules that a file imports."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_no_two_test_modules_share_a_name():
    counts = Counter(file.name for file in FILES if file.name != "conftest.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_files_import_no_helper_of_another_folder_and_no_conftest():
    """Check that test files import helpers only from their own folder or from tests/.

    pytest adds only the folders of collected test files to `sys.path`. All files named conftest.py
    share one module name, so `import conftest` may import the file of another folder.
    """
    wrong = [
        f"{file.relative_to(TESTS)} imports {name}"
        for file in FILES
        for name in imported_names(file)
        if (
            name in NAMES
            and not (file.parent / f"{name}.py").is_file()
            and not (TESTS / f"{name}.py").is_file()
        )
        or name == "conftest"
    ]
    assert wrong == []
