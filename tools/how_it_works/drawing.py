"""A small SVG writer, and the shapes that the pictures have in common.

A picture has its own background, so that it is readable on any page. The background is light or
dark, as the reader's browser prefers. The code does not measure text. Boxes are wide enough for any
text of the same number of letters.
"""

from collections.abc import Iterable
from html import escape

CHAR = 8
"""Upper bound of the width of a letter in pixels, for a font size of 13 px."""

SLOT_HEIGHT = 24

_LIGHT = {
    "card": ("#ffffff", "#d0d7de"),
    "a": ("#cfe4ff", "#2969c0"),
    "b": ("#ffe0bd", "#b35a00"),
    "s": ("#e3d5fb", "#7a45c4"),
    "c": ("#cdeed2", "#2a7d3c"),
    "bad": ("#f9d3d0", "#c23a30"),
    "free": ("#f4f6f8", "#c3cad2"),
    "empty": ("none", "#8d96a0"),
}
_DARK = {
    "card": ("#0f141a", "#3a424c"),
    "a": ("#173a66", "#6aa8f5"),
    "b": ("#5a3208", "#f0a04b"),
    "s": ("#432a6b", "#b592f0"),
    "c": ("#173f22", "#6cc383"),
    "bad": ("#5b211d", "#f0837b"),
    "free": ("#181e26", "#3f4853"),
    "empty": ("none", "#78828d"),
}
_INK = {"light": ("#1f2328", "#5a636d"), "dark": ("#e6ebf1", "#9aa5b1")}


class Picture:
    """An SVG drawing with a title. A shape covers the shapes that were drawn before it."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self._items: list[str] = []
        self.text(24, 34, title, "title")

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Draw one line of text; `y` is the position of the baseline."""
        names = f' class="{kind}"' if kind else ""
        place = f'x="{_number(x)}" y="{_number(y)}"'
        anchors = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._items.append(f"<text {place}{names}{anchors}>{escape(words, quote=False)}</text>")

    def box(self, x: float, y: float, width: float, height: float, kind: str, r: int = 3) -> None:
        """Draw a rectangle in the colours of `kind`."""
        size = f'width="{_number(width)}" height="{_number(height)}"'
        self._items.append(
            f'<rect x="{_number(x)}" y="{_number(y)}" {size} rx="{r}" class="{kind}"/>'
        )

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str = "line") -> None:
        """Draw a straight line."""
        ends = f'x1="{_number(x0)}" y1="{_number(y0)}" x2="{_number(x1)}" y2="{_number(y1)}"'
        self._items.append(f'<line {ends} class="{kind}"/>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float, kind: str = "ink") -> None:
        """Draw a curved arrow with horizontal ends."""
        bend = (x1 - x0) / 2
        head = 6 if x1 > x0 else -6
        start, end = f"{_number(x0)} {_number(y0)}", f"{_number(x1 - head)} {_number(y1)}"
        bends = f"{_number(x0 + bend)} {_number(y0)} {_number(x1 - bend)} {_number(y1)}"
        self._items.append(f'<path d="M{start}C{bends} {end}" class="arrow {kind}"/>')
        tip = f"M{_number(x1)} {_number(y1)}l{-head - head // 3} -4v8z"
        self._items.append(f'<path d="{tip}" class="head {kind}"/>')

    def down(self, x: float, y0: float, y1: float) -> None:
        """Draw a straight arrow downwards or upwards."""
        head = 6 if y1 > y0 else -6
        self.line(x, y0, x, y1 - head)
        tip = f"M{_number(x)} {_number(y1)}l-4 {-head - head // 3}h8z"
        self._items.append(f'<path d="{tip}" class="head ink"/>')

    def slots(
        self, x: float, y: float, words: Iterable[str], kind: str, width: float, num_slots: int = 4
    ) -> None:
        """Draw a block as a row of `num_slots` slots; the first slots contain `words`."""
        filled = list(words)
        for index in range(num_slots):
            left = x + index * width
            is_filled = index < len(filled)
            is_held = bool(filled)
            look = kind if is_filled else "empty dashed" if is_held else "free"
            self.box(left, y, width, SLOT_HEIGHT, look, r=0)
            if is_filled:
                self.text(left + width / 2, y + 16, filled[index], anchor="middle")

    def render(self) -> str:
        """Return the SVG document."""
        size = f'width="{self.width}" height="{self.height}"'
        box = f'viewBox="0 0 {self.width} {self.height}"'
        card = f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"'
        title = escape(self.title, quote=False)
        body = "\n".join(self._items)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img">\n'
            f"<title>{title}</title>\n<style>{_style()}</style>\n"
            f'{card} class="card"/>\n{body}\n</svg>\n'
        )


def slot_width(words: Iterable[str]) -> float:
    """Return the width of a slot in pixels, so that the longest word fits."""
    return max(map(len, words), default=0) * CHAR + 8


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _style() -> str:
    font = 'system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif'
    return (
        f"text{{font:13px {font}}}.title{{font-size:16px;font-weight:600}}"
        ".strong{font-weight:600}.small{font-size:11px}"
        ".dashed{stroke-dasharray:3 3}.arrow{fill:none;stroke-width:1.4}.line{stroke-width:1.2}"
        ".dotted{stroke-width:1.6;stroke-dasharray:2 5}"
        f"{_colours(_LIGHT, *_INK['light'])}"
        f"@media(prefers-color-scheme:dark){{{_colours(_DARK, *_INK['dark'])}}}"
    )


def _colours(boxes: dict[str, tuple[str, str]], ink: str, dim: str) -> str:
    rules = [f"text{{fill:{ink}}}.dim{{fill:{dim}}}.line,.dotted{{stroke:{dim}}}"]
    rules += [f"rect.{name}{{fill:{f};stroke:{s}}}" for name, (f, s) in boxes.items()]
    rules += [
        f".arrow.{name}{{stroke:{s}}}.head.{name}{{fill:{s}}}"
        for name, s in (*((n, s) for n, (_, s) in boxes.items()), ("ink", dim))
        if name not in ("card", "free", "empty")
    ]
    return "".join(rules)
