"""Test that jpaged.core imports neither JAX nor a third-party package except NumPy and xxhash."""

import ast
import subprocess
import sys
from pathlib import Path

import jpaged.core

ALLOWED = set(sys.stdlib_module_names) | {"numpy", "xxhash"}
SHARED = ("errors", "options")  # modules of jpaged that core may import
CORE = Path(jpaged.core.__file__).parent


def imported_modules(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {source.name}"
            names.add(node.module or "")
    return names


def is_allowed(module: str) -> bool:
    is_own = f"{module}.".startswith("jpaged.core.") or module in [f"jpaged.{s}" for s in SHARED]
    return is_own or module.split(".")[0] in ALLOWED


def test_core_imports_the_standard_library_numpy_and_shared_modules_only():
    sources = [*CORE.rglob("*.py"), *(CORE.parent / f"{name}.py" for name in SHARED)]
    assert len(sources) > 5
    foreign = {
        (source.name, module)
        for source in sources
        for module in imported_modules(source)
        if not is_allowed(module)
    }
    assert foreign == set()


def test_importing_core_does_not_import_jax():
    names = [p.stem for p in CORE.glob("*.py") if p.stem != "__init__"]
    imports = "\n".join(f"import jpaged.core.{name}" for name in sorted(names))
    code = f"import sys\n{imports}\nprint({{'jax', 'flax', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
