"""Run the notebooks of docs/notebooks and store what they show: `make notebooks`.

Plotly figures are stored as data, which notebooks draw and docs/conf.py draws on the site; its script is not stored.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"
RENDERER = "plotly_mimetype"


def run(path: Path) -> None:
    """Run a notebook in a folder of its own, and write it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}, record_timing=False).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # those that are drawn anew would change the file each time
    notebook["metadata"] = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["PLOTLY_RENDERER"] = RENDERER
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        print(name)
        run(FOLDER / f"{name}.ipynb")
