"""Test the structured-output benchmark on the bundled model."""

from collections.abc import Callable

import pytest

from bench import structured
from bench.structured import FIELDS, Size
from jpaged import Engine

WITHOUT = ["unconstrained", "single", "unconstrained again"]
SIZE = Size(rows=4, answers=50, max_tokens=480, tokens=24, repeats=1)


@pytest.fixture
def engine(kept_engines: Callable[..., Engine]) -> Engine:
    return kept_engines(max_num_seqs=8, max_model_len=512, num_blocks=400)


def test_benchmark_schema_has_20_properties_which_are_all_required():
    assert len(FIELDS["properties"]) == len(FIELDS["required"]) == 20


@pytest.mark.full
def test_answers_with_finish_reason_stop_match_their_schema(engine: Engine):
    row = structured.shares(engine, SIZE)
    # The exact number of answers that end by themselves depends on the CPU model, because of
    # rounding.
    assert row["stop"] == row["valid"] >= 0.8 * row["answers"]
    assert row["length"] == row["beginnings"]
    assert row["stop"] + row["length"] == row["answers"] == 50


def test_answers_that_break_the_schema_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    schemas = structured.published()
    types = {"type": "string", "maxLength": 3}, {"type": "null"}
    # The engine constrains the answers with the first schema. The validator checks them against the
    # second.
    published = iter([dict.fromkeys(schemas, it) for it in types])
    monkeypatch.setattr(structured, "published", lambda: next(published))
    row = structured.shares(engine, SIZE._replace(answers=4))
    assert (row["stop"], row["valid"]) == (4, 0)


@pytest.mark.full
def test_result_tables_for_masks_and_speeds_have_all_rows(engine: Engine):
    rows = structured.masks(engine, SIZE)
    assert [row["schemas"] for row in rows] == ["published", "fields", "unbounded"]
    for row in rows:
        assert 0 < row["later_50_ms"] <= row["later_99_ms"] <= row["later_100_ms"]
    cases = {row["case"]: row for row in structured.speeds(engine, SIZE)}
    assert [*cases] == [
        "unconstrained",
        "single",
        "beside",
        "constrained",
        "unbounded beside",
        "unbounded constrained",
        "unconstrained again",
    ]
    assert all(row["tokens_per_s"] > 0 for row in cases.values())
    without_free = {case for case, row in cases.items() if row["free_of_before"] is None}
    assert without_free == {"constrained", "unbounded constrained"}
    assert [case for case, row in cases.items() if row["formed_of_before"] is None] == WITHOUT
    assert cases["unconstrained"]["of_before"] == cases["unconstrained"]["free_of_before"] == 1


def test_benchmark_measures_every_part_of_the_host_time_of_a_step(engine: Engine):
    of_masks = {"masks", "start", "thread_tokens", "process_accept", "process_masks"}
    for row in structured.parts(engine, SIZE):
        assert {it for it in of_masks if row[it] > 0} == (
            set() if row["case"] in WITHOUT else of_masks
        )
        assert all(row[it] > 0 for it in ("layers", "read", "update", "sampling", "other"))
        parts = sum(row[part] for part in structured.PARTS)
        assert 0.5 * row["ms_a_step"] < parts < row["ms_a_step"]
