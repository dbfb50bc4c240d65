"""Measure the structure of the code: components, imports between them, files and lines.

    python -m tools.house            # print the counts and their definitions
    python -m tools.house --details  # also list the imports and functions that were counted

Definitions:

    component       a folder of `jpaged/` with its subfolders, `pallas_kernels/`, or a Python file
                    directly in `jpaged/` other than `__init__.py`
    dependency      a component that imports another component. Imports in functions and under
                    TYPE_CHECKING count. An import of a public name from `jpaged` counts as an
                    import of the module that defines the name
    longest chain   the longest chain of dependencies; an import cycle counts as one component
    cycle           an import cycle at run time, between components or between files
    upward import   an import of a component in a higher layer of `LAYERS`
    lines           all lines of Python, with comments and blank lines; for the dashboard, the lines
                    of the server's static files
    decode step     a greedy decode step of one request by `Engine.step` in the synchronous loop,
                    with stubs for the compiled programs. The request does not end and needs no new
                    block. The counts are the distinct functions of jpaged that are called, their
                    modules, all calls, and calls from one module to another. A comprehension or
                    generator expression belongs to the function that contains it
    private names   uses of jpaged's private names in `tests/`: attributes, imported names and
                    strings. Attributes of `self`, `cls` and `super()` do not count
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parent.parent
PACKAGES = "jpaged", "pallas_kernels"

LAYERS = (
    ("pallas_kernels", "core", "errors", "options", "processes", "text"),
    ("structured_outputs",),
    ("parsing", "models", "sampling_params"),
    ("config", "observe"),
    ("outputs", "runtime"),
    ("compile",),
    ("engine",),
    ("serve", "terminal"),
    ("__main__", "calibrate", "doctor"),
)
"""Components by layer, the lowest layer first.

Components of one layer may import each other, but without a cycle.
"""

Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Import:
    """An import of one module by another module.

    Attributes:
        importer: Name of the module that imports.
        imported: Name of the imported module.
        typed: Whether the import is under TYPE_CHECKING.
    """

    importer: str
    imported: str
    typed: bool


@dataclass
class Step:
    """Record of what one decode step calls: the functions, the modules that define them, the number
    of calls, and the number of calls from one module to another."""

    functions: set[CodeType] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    num_calls: int = 0
    num_changes: int = 0


def module_files(root: Path = ROOT) -> dict[str, Path]:
    """Return the files of all modules of `PACKAGES`, by module name."""
    files = sorted(file for name in PACKAGES for file in (root / name).rglob("*.py"))
    return {_module_name(file.relative_to(root)): file for file in files}


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(files: Mapping[str, Path]) -> set[Import]:
    """Parse the files and return the imports between their modules."""
    found: set[Import] = set()
    for module, file in files.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node, typed in _import_nodes(tree, typed=False):
            found |= {Import(module, name, typed) for name in _targets(node, files)}
    return {it for it in found if it.importer != it.imported}


def _import_nodes(tree: ast.AST, *, typed: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, typed
        test = child.test if isinstance(child, ast.If) else None
        guarded = isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
        yield from _import_nodes(child, typed=typed or guarded)


def _targets(node: ast.AST, files: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for name in node.names:
            whole = f"{node.module}.{name.name}"
            home = (
                _public_names(files["jpaged"]).get(name.name) if node.module == "jpaged" else None
            )
            target = whole if whole in files else home or node.module
            if target in files:
                yield target
    elif isinstance(node, ast.Import):
        yield from (name.name for name in node.names if name.name in files)


@cache
def _public_names(file: Path) -> dict[str, str]:
    """Map each public name of `jpaged` to the module that defines it (the table `_EXPORTS`)."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_EXPORTS":
            table = ast.literal_eval(node.value)
            return {name: module for module, names in table.items() for name in names}
    return {}


def component_of(module: str) -> str | None:
    """Return the component that contains a module, or None for `jpaged` itself.

    A component is a folder or file directly in `jpaged/`, or the package `pallas_kernels`.
    """
    package, *inner = module.split(".")
    if package != "jpaged":
        return package
    return inner[0] if inner else None


def component_graph(imports: Iterable[Import], *, typed: bool) -> dict[str, set[str]]:
    """Map each component to the components that it imports.

    A component is a folder or file directly in `jpaged/`, or the package `pallas_kernels`. If
    `typed` is true, imports under TYPE_CHECKING count too.
    """
    graph: dict[str, set[str]] = {}
    for it in imports:
        importer, imported = component_of(it.importer), component_of(it.imported)
        if importer and imported and importer != imported and (typed or not it.typed):
            graph.setdefault(importer, set()).add(imported)
    return graph


def file_graph(imports: Iterable[Import]) -> dict[str, set[str]]:
    """Map each module to the modules that it imports at run time."""
    graph: dict[str, set[str]] = {}
    for it in imports:
        if not it.typed and it.importer not in PACKAGES and it.imported not in PACKAGES:
            graph.setdefault(it.importer, set()).add(it.imported)
    return graph


def strongly_connected(graph: Graph) -> list[frozenset[str]]:
    """Return the strongly connected components of a graph, in reverse topological order."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(frozenset(stack[at:]))
            del stack[at:]

    for node in sorted(set(graph).union(*graph.values())):
        if node not in index:
            visit(node)
    return found


def import_cycles(graph: Graph) -> list[list[str]]:
    """Return the import cycles: groups of two or more nodes, each of which reaches all others of
    the group."""
    return [sorted(group) for group in strongly_connected(graph) if len(group) > 1]


def longest_chain(graph: Graph) -> int:
    """Return the number of nodes in the longest path of a graph. A cycle counts as one node."""

    groups = strongly_connected(graph)
    group_of = {node: group for group in groups for node in group}
    height: dict[frozenset[str], int] = {}
    for group in groups:
        below = {group_of[target] for node in group for target in graph.get(node, ())} - {group}
        height[group] = 1 + max((height[it] for it in below), default=0)
    return max(height.values(), default=0)


def upward_imports(imports: Iterable[Import]) -> list[Import]:
    """Return the imports by which a component imports a component of a higher layer.

    Also return imports in which the importing or the imported component is missing in `LAYERS`.
    """
    layer = {name: level for level, names in enumerate(LAYERS) for name in names}
    found = []
    for it in imports:
        importer, imported = component_of(it.importer), component_of(it.imported)
        known = importer in layer and imported in layer
        if importer and imported and (not known or layer[imported] > layer[importer]):
            found.append(it)
    return sorted(found, key=lambda it: (it.importer, it.imported))


def top_level_files(root: Path = ROOT) -> list[str]:
    """Return the Python files directly in `jpaged/`, including `__init__.py`."""
    return sorted(file.name for file in (root / "jpaged").glob("*.py"))


def private_accesses(files: Mapping[str, Path], root: Path = ROOT) -> list[str]:
    """Return each use of a private name of jpaged in `tests/`, as "file:line: name"."""
    known = {name for file in files.values() for name in _private_names(file)}
    found = []
    for file in sorted((root / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in known.intersection(_accessed_names(node)):
                found.append(f"{file.relative_to(root)}:{getattr(node, 'lineno', 0)}: {name}")
    return found


def _private_names(file: Path) -> Iterator[str]:
    """Yield the names with one leading underscore that a file defines."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            continue
        if name.startswith("_") and name.strip("_") and not name.startswith("__"):
            yield name


def _accessed_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        owner = node.value.func if isinstance(node.value, ast.Call) else node.value
        own = isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super")
        return [] if own else [node.attr]
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    strings = [] if isinstance(node, ast.JoinedStr) else ast.iter_child_nodes(node)
    return [it.value for it in strings if isinstance(it, ast.Constant) and type(it.value) is str]


def num_lines(files: Iterable[Path]) -> int:
    """Return the total number of lines of the files."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def page_files(root: Path = ROOT) -> list[Path]:
    """Return the static files of the server's dashboard."""
    return [file for file in (root / "jpaged/serve").rglob("static/*") if file.is_file()]


def trace_step() -> Step:
    """Run a greedy decode step with stub programs, and return what it calls."""
    from bench.null_device import BLOCK_SIZE, Clock, make_engine, runtime_of
    from jpaged.config import LoopMode
    from jpaged.sampling_params import SamplingParams

    engine = make_engine(runtime_of(1), Clock(), LoopMode.SYNCHRONOUS)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    engine.add_request(list(range(BLOCK_SIZE + 1)), params)
    for _ in range(5):
        engine.step()
    step, files = Step(), {str(file): name for name, file in module_files().items()}

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        module = files.get(code.co_filename)
        if event != "call" or module is None or _is_part(code):
            return
        caller = frame.f_back
        while caller is not None and (
            caller.f_code.co_filename not in files or _is_part(caller.f_code)
        ):
            caller = caller.f_back
        step.functions.add(code)
        step.modules.add(module)
        step.num_calls += 1
        step.num_changes += caller is None or files[caller.f_code.co_filename] != module

    sys.setprofile(watch)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return step


def _is_part(code: CodeType) -> bool:
    return code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def main() -> None:
    """Print numbers that describe the structure of the code, such as dependencies, cycles and
    lines, with their definitions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--details", action="store_true", help="list what was counted")
    details = parser.parse_args().details
    files = module_files()
    imports = find_imports(files)
    graph, step = component_graph(imports, typed=True), trace_step()
    running = component_graph(imports, typed=False)
    names = sorted({name for module in files if (name := component_of(module))})
    component_cycles, file_cycles = import_cycles(running), import_cycles(file_graph(imports))
    upward, private = upward_imports(imports), private_accesses(files)
    lines = {name: num_lines((ROOT / name).rglob("*.py")) for name in PACKAGES}
    print(__doc__)
    for what, count in (
        ("components", len(names)),
        ("dependencies", sum(map(len, graph.values()))),
        ("components in the longest chain", longest_chain(graph)),
        ("cycles of components", len(component_cycles)),
        ("cycles of files", len(file_cycles)),
        ("upward imports", len(upward)),
        ("files directly in jpaged/", len(top_level_files())),
        ("files of jpaged and pallas_kernels", len(files)),
        ("lines of jpaged/", lines["jpaged"]),
        ("lines of pallas_kernels/", lines["pallas_kernels"]),
        ("lines of the dashboard", num_lines(page_files())),
        ("functions in a decode step", len(step.functions)),
        ("modules in a decode step", len(step.modules)),
        ("changes of module in a decode step", step.num_changes),
        ("calls in a decode step", step.num_calls),
        ("private names in tests", len(private)),
    ):
        print(f"{what:<36}{count:>8,}")
    if details:
        _print_details(graph, component_cycles + file_cycles, upward, step)
        print(*(f"private: {it}" for it in private), sep="\n")


def _print_details(graph: Graph, found: list[list[str]], upward: list[Import], step: Step) -> None:
    for name in sorted(graph):
        print(f"{name} -> {', '.join(sorted(graph[name]))}")
    for group in found:
        print("cycle:", ", ".join(group))
    for it in upward:
        print(f"upward: {it.importer} imports {it.imported}")
    by_file = Counter(Path(code.co_filename).relative_to(ROOT) for code in step.functions)
    for file, count in sorted(by_file.items()):
        own = (it for it in step.functions if Path(it.co_filename) == ROOT / file)
        print(f"{file}: {count}: {', '.join(sorted(it.co_qualname for it in own))}")


if __name__ == "__main__":
    main()
