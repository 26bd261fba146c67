#!/usr/bin/env python
"""Photograph one round of docs/replay.html with Chromium, as docs/img/replay.png.

benchmarks/replay_picture.py [--round 4]

The page is laid out for the width of a README: the tree keeps its size and is cut at the right, where it only goes on, and
what a picture does not need (buttons, the lanes, the color of drafts whose result is not there yet) is left out.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "replay.html", ROOT / "docs" / "img" / "replay.png"
TITLE = "The branch behind the target's own token was ready"
WIDTH, HEIGHT = 740, 940  # of the page, pixels
SCALE = 1.5  # pixels of the picture for each of them
STYLE = f"""
  header select, header span, #time {{ display: none }}
  header::before {{ content: "{TITLE}"; width: 100%; font-size: 1.3rem; font-weight: 700 }}
  h1 {{ font-weight: 400 !important }}
  :root {{ --faint: #5d6870 !important }}
  #tree {{ height: auto !important; overflow: hidden !important; padding-top: .5rem;
           mask-image: linear-gradient(to right, black 88%, transparent) }}
  section:has(#lanes), .legend span:first-child {{ display: none }}
  .legend::after {{ content: "· is a space, ↵ a line end" }}
"""
CHROMIUM = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking --disable-sync"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round", type=int, default=4, help="which verdict of the run")
    parser.add_argument("--chromium", default="chromium", help="the browser's command")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "page.html"
        page.write_text(for_print(PAGE.read_text()))
        options = [
            *CHROMIUM.split(),
            f"--user-data-dir={directory}/profile",
            f"--force-device-scale-factor={SCALE}",
            "--blink-settings=preferredColorScheme=1",  # light
            f"--window-size={WIDTH},{HEIGHT}",
            f"--screenshot={PICTURE}",
        ]
        command = [args.chromium, *options, f"file://{page}#round={args.round}"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)
    print(f"{PICTURE.name}: {PICTURE.stat().st_size} bytes")


def for_print(page: str) -> str:
    """The page with a title, in the size of the picture."""
    shrinks = "Math.max(0.6, Math.min(1, "
    assert page.count(shrinks) == 1, "the page shrinks its tree in another way now"
    return page.replace(shrinks, "Math.max(1, Math.min(1, ").replace("</style>", f"{STYLE}</style>", 1)


if __name__ == "__main__":
    main()
