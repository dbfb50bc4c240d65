"""Draw the pictures of docs/how_it_works.md: `python -m tools.how_it_works`."""

from pathlib import Path

from tools.how_it_works.figures import FIGURES

FOLDER = Path(__file__).parents[2] / "docs" / "how_it_works"

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(FOLDER / f"{name}.svg")
