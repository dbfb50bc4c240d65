"""Engines that compile each program when it is first called.

An engine compiles all of its programs before it serves, and a test needs a few of them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import pytest

from jpaged.compile import compilation
from jpaged.compile.builder import ProgramBuilder, lower
from jpaged.compile.recipes import Recipe
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.programs import Name, Programs


class LazyProgram:
    """A program that is compiled when it is first needed.

    Args:
        compile: Returns the compiled program.
    """

    def __init__(self, compile: Callable[[], Any]):
        self._compile = compile

    @cached_property
    def program(self) -> Any:
        """The compiled program."""
        return self._compile()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.program(*arguments, **keywords)


class LazyBuilder(ProgramBuilder):
    """A `ProgramBuilder` whose programs are compiled later, in the thread that first calls them."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self._lazy: dict[Name, LazyProgram] = {}

    def add(self, recipes: Iterable[Recipe]) -> None:
        """Keep the recipes."""
        for recipe in recipes:
            self._lazy.setdefault(recipe.name, LazyProgram(partial(self._compile_now, recipe)))

    def programs(self) -> Programs:
        """Return the programs, none of them compiled yet."""
        return self._lazy

    def _compile_now(self, recipe: Recipe) -> Any:
        return self._settings.run(
            lambda: self._compiler.compile(recipe, lower(recipe, self._store))
        )


@contextmanager
def lazy_programs() -> Iterator[None]:
    """Let engines that are made meanwhile compile each program when it is first called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "ProgramBuilder", LazyBuilder)
        patch.setattr(ModelRunner, "warm_up", lambda runner: None)  # which calls every program
        yield
