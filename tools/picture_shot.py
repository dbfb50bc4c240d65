"""Take the README's screenshot of the dashboard (`python -m tools.picture_shot`).

The script starts a server with the bundled model and sends requests. While the requests run, the
script pauses the dashboard and writes the screenshot to `docs/picture.png`. It needs Chromium, and
the packages of `pip install -e ".[test]"`.
"""

import argparse
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

OUT = Path(__file__).parents[1] / "docs" / "picture.png"
FLAGS = ("--num-blocks", "257", "--max-num-seqs", "16", "--max-model-len", "512")
MOST_BYTES = 200_000


@contextmanager
def server():
    """Start a server, and yield its URL. Stop the server when the context ends."""
    command = [sys.executable, "-m", "jpaged.serve", "--port", "0", "--dashboard-show-text", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr or ():
            if found := re.search(r"serving .* at (http\S+)", line):
                yield found[1]
                break
    finally:
        process.terminate()
        process.wait()


def ask(page: Any, *presets: str) -> None:
    """Send requests from the dashboard: the presets whose labels start with the given strings."""
    page.evaluate(ASK, presets)


ASK = """(presets) => {
  const choice = document.getElementById("preset");
  for (const preset of presets) {
    choice.value = [...choice.options].find(({ text }) => text.startsWith(preset)).value;
    choice.dispatchEvent(new Event("change"));
    document.getElementById("ask").requestSubmit();
  }
}"""


def pose(page: Any) -> None:
    """Pause the dashboard after a step that copied a block, and select a shared block."""
    page.wait_for_selector("#line.live")
    page.select_option("#pace", "live")
    ask(page, "A crowd")
    page.wait_for_timeout(4000)
    page.select_option("#pace", "0")
    ask(page, "One beginning", "One answer", "Four samples")
    page.wait_for_timeout(3000)
    page.focus("#grid")
    while not page.query_selector(".kind.copy.some"):
        if not page.evaluate("jpaged.player.waiting.length"):
            sys.exit("no block copy was seen: run the tool again")
        page.keyboard.press(".")
        page.wait_for_timeout(300)  # The page needs at most 300 ms to draw the step.
    block = page.evaluate("jpaged.state.pool.counts.indexOf(4)")
    page.evaluate(f"jpaged.grid.select({block}, true)")
    page.wait_for_timeout(1500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default=shutil.which("chromium"), help="path of a Chromium")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with ExitStack() as stack:
        address = stack.enter_context(server())
        playwright = stack.enter_context(sync_playwright())
        options = {"executable_path": args.browser, "args": ["--no-sandbox"]}
        browser = stack.enter_context(playwright.chromium.launch(**options))
        page = browser.new_page(viewport={"width": 1240, "height": 830}, color_scheme=args.scheme)
        page.goto(address)
        pose(page)
        page.screenshot(path=args.out)
    size = args.out.stat().st_size
    print(f"{args.out}: {size:,} bytes")
    if size > MOST_BYTES:
        sys.exit(f"{args.out} has {size:,} bytes, over {MOST_BYTES:,}: use a smaller viewport")


if __name__ == "__main__":
    main()
