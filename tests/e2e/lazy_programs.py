"""Create engines that compile each program when it is first called. This is faster, because a test
needs only a few of the programs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import pytest

from jpaged.compile import compilation
from jpaged.compile.builder import ProgramBuilder, lower
from jpaged.compile.gemm_autotuning import Compiler
from jpaged.compile.recipes import Recipe
from jpaged.compile.store import ProgramStore
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.programs import ProgramName, Programs


class LazyProgram:
    """A program that is compiled at its first call, by the function `compile`."""

    def __init__(self, compile: Callable[[], Any]):
        self._compile = compile

    @cached_property
    def program(self) -> Any:
        return self._compile()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.program(*arguments, **keywords)


class LazyBuilder(ProgramBuilder):
    """A `ProgramBuilder` that compiles each program when the program is first called.

    Programs do not refer to the builder, because a reference cycle between builder and programs
    would never be freed. The reason is `gc.freeze`, which the start of an engine calls: the garbage
    collector then ignores all existing objects.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self._lazy: dict[ProgramName, LazyProgram] = {}

    def add(self, recipes: Iterable[Recipe]) -> None:
        for recipe in recipes:
            compile_now = partial(_compile, recipe, self._store, self._compiler)
            run = partial(self._settings.run, compile_now)
            self._lazy.setdefault(recipe.name, LazyProgram(run))

    def programs(self) -> Programs:
        return self._lazy


def _compile(recipe: Recipe, store: ProgramStore | None, compiler: Compiler) -> Any:
    return compiler.compile(recipe, lower(recipe, store))


@contextmanager
def lazy_programs() -> Iterator[None]:
    """Make engines that start inside the `with` block compile each program at the first call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "ProgramBuilder", LazyBuilder)
        patch.setattr(ModelRunner, "warm_up", lambda runner: None)  # would compile every program
        yield
