"""Which share of a start's programs a worker compiles."""

from jpaged.compile_worker import share_of
from jpaged.runtime.recipe import Recipe


def named(*names: tuple) -> list[Recipe]:
    poolless = "sample", "prompt_logprobs"
    return [Recipe(name, print, needs_pool=name[0] not in poolless) for name in names]


def test_shares_are_all_programs_once_and_kernels_in_common_stay_together():
    made = named(
        ("decode", 8),
        ("prefill", (64, 8)),
        ("sample", (8, 0)),
        ("prefill", (128, 8)),
        ("prefill", (64, 256)),
        ("sample", (8, 1)),
        ("load_rows", None),
    )
    shares = [[recipe.name for recipe in share_of(made, i, 2)] for i in range(2)]
    assert shares == [
        [("sample", (8, 0)), ("sample", (8, 1)), ("prefill", (128, 8)), ("decode", 8)],
        [("prefill", (64, 8)), ("prefill", (64, 256)), ("load_rows", None)],
    ]
