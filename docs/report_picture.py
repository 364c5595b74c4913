"""The picture of the report in README: made from a comparison by a browser, and known to be current.

    make picture                                   # runs the comparison of `make run`, and makes the picture
    python docs/report_picture.py runs/compare-1   # of a comparison that is there

A digest of the sources of the page is kept in the picture; tests/test_docs.py compares it with that of the sources now.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, PngImagePlugin

HERE = Path(__file__).parent
PICTURE = HERE / "report.png"
SOURCES = ("report.html.jinja", "page.py", "plots.py", "palette.py")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH, HEIGHT = 1280, 1180


def digest() -> str:
    """Of the sources that decide what the page looks like."""
    state = hashlib.sha256()
    for name in SOURCES:
        state.update((HERE.parent / "src" / "sparsona" / "report" / name).read_bytes())
    return state.hexdigest()


def main(folder: str) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit("no Chromium or Chrome on the PATH")
    from sparsona.experiment.run import views_in
    from sparsona.report.page import write_report

    with tempfile.TemporaryDirectory() as place:
        page, shot = write_report(views_in(folder), Path(place) / "page.html"), Path(place) / "shot.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
        options += ["--disable-component-update", "--hide-scrollbars", "--virtual-time-budget=10000"]
        options += [f"--user-data-dir={place}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}"]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True, timeout=120)
        about = PngImagePlugin.PngInfo()
        about.add_text("sources", digest())
        picture = Image.open(shot).convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
        picture.save(PICTURE, pnginfo=about, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    main(sys.argv[1])
