"""The README shows what was measured."""

import pytest

from bench.readme_table import BEGIN, END, README, render


def test_the_readme_has_the_committed_figures():
    text = README.read_text(encoding="utf-8")
    assert render(text) == text, "run python -m bench.readme_table --write"


def test_only_what_is_between_the_markers_changes():
    rendered = render(f"before\n{BEGIN}\nstale\n{END}\nafter")
    assert rendered.startswith(f"before\n{BEGIN}\n|")
    assert rendered.endswith(f"|\n{END}\nafter")
    assert "stale" not in rendered


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="lacks"):
        render(f"{END} {BEGIN}")
