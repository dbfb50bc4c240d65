"""Start an engine up to the compilation of its programs.

`python start_helpers.py FOLDER` prints the first compile worker's job and the runtime limits as
JSON.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jpaged.compile.recipes import Recipe, Recipes
from jpaged.compile.sizing import Sizing
from jpaged.compile.store import open_program_store
from jpaged.compile.workers import CompilePool, make_compile_jobs, to_json
from jpaged.config import EMBEDDED_MODEL, EngineConfig
from jpaged.models.checkpoint import read_config
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import make_abstract_model
from jpaged.runtime.programs import SplitModel

FLOAT32 = jnp.dtype(jnp.float32)


class Start:
    """An engine start that has reached the compilation of the engine's programs.

    Two worker processes compile the programs. The engine serves the small model in jpaged's
    package.

    Args:
        cache: Folder for compiled programs.
    """

    def __init__(self, cache: Path):
        config = EngineConfig(compilation_cache_dir=cache, num_compile_workers=2, max_num_seqs=2)
        model = read_model_config(read_config(EMBEDDED_MODEL))
        device, draft = jax.local_devices()[0], make_abstract_model(model, FLOAT32)
        store = open_program_store(cache, model, draft, device)
        assert store is not None
        split, self.store, self.said = SplitModel.of(draft), store, list[str]()
        self.runtime, _, shapes = Sizing(config, model, split, FLOAT32, [device]).fit(0)
        self.recipes = [*Recipes(split, shapes, self.runtime)]
        self.jobs = make_compile_jobs(
            config, EMBEDDED_MODEL, FLOAT32, device, store, has_gemm_record=True
        )

    def pool(self) -> CompilePool:
        return CompilePool(self.jobs, self.store, self.said.append)


def names(made: Iterable[Recipe]) -> list[str]:
    """Return the sorted program names. A `Recipe` describes one program to compile."""
    return sorted(repr(recipe.name) for recipe in made)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    started = Start(Path(sys.argv[1]))
    job = replace(started.jobs[0], limits=started.runtime)
    for record in (job, started.runtime):
        print(to_json(record).decode())
