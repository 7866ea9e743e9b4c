"""The pictures of the documentation, taken of real pages in a real browser.

`python -m tests.docs.pictures` makes the pages of the demo model and writes docs/images.
"""

import contextlib
import tempfile
from pathlib import Path

import numpy as np

import aprfmt
from tests.causes.faults import flipped
from tests.cli.browser import browser
from tests.cli.run import aprfmt as command
from tests.compare.damage import patched
from tests.docs.examples import DOCS, ROOT

WIDTH, SCALE = 1240, 0.75  # CSS pixels, and those of the picture for each
HEIGHTS = {"model": 900, "diff": 1330, "diagnose": 1150, "parity": 1050}


def broken(data: dict[str, bytes]) -> None:
    """Flip a bit of one tensor, exchange two heads of another and lose 16 rows of a third."""
    up, q, down = "blk.3.ffn_up.weight", "blk.0.attn_q.weight", "blk.2.ffn_down.weight"
    data[up] = flipped(4321, 6)(data[up])
    heads = np.frombuffer(data[q], np.uint8).reshape(4, -1)
    data[q] = heads[[1, 0, 2, 3]].tobytes()
    row = len(data[down]) // 256
    data[down] = data[down][: 96 * row] + bytes(16 * row) + data[down][112 * row :]


def main() -> None:
    """Write every picture."""
    demo = ROOT / "fixtures" / "demo"
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):  # names without a folder
        folder = Path()
        clean, wrong, base = (folder / f"{each}.gguf" for each in ("clean", "broken", "base"))
        aprfmt.convert(demo, clean)
        patched(clean, wrong, broken)
        command("quantize", demo, folder / "demo-Q4_K_M.gguf", "--type", "Q4_K_M")
        command("set", clean, "qwen2.rope.freq_base=10000", "-o", base)
        runs = {
            "model": ("inspect", folder / "demo-Q4_K_M.gguf", "--stats"),
            "diff": ("diff", clean, wrong),
            "diagnose": ("diagnose", clean, base),
            "parity": ("parity", clean, "--between", "numpy:float64", "numpy:float32"),
        }
        with browser(Path(name) / "profile") as tab:
            for each, words in runs.items():
                page = folder / f"{each}.html"
                done = command(*words, "--html", page, "--quiet")
                assert done.code in (0, 1), done.err
                tab.show(WIDTH, height=HEIGHTS[each], scale=SCALE)
                tab.call("Emulation.setScrollbarsHidden", hidden=True)
                tab.open(page)
                assert tab.complaints() == []
                (DOCS / "images" / f"{each}.png").write_bytes(tab.picture())


if __name__ == "__main__":
    main()
