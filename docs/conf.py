"""The docs as a site: `make docs`. Nothing is fetched from the network, when it is built or when it is read."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "src"))

from sparsona.core.version import VERSION  # noqa: E402  (of this checkout, not of what may be installed)

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]

project = "Sparsona"
author = "The Sparsona maintainers"
project_copyright = author
version = release = VERSION
exclude_patterns = ["_build", "jupyter_execute"]  # what a build leaves behind

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # `make notebooks` stores what they show
highlight_language = "text"
default_role = "code"  # docstrings write `name` as Markdown does

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "Sparsona"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["notebooks.css"]
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00695c", "color-brand-content": "#00695c"},
    "dark_css_variables": {"color-brand-primary": "#4db6ac", "color-brand-content": "#4db6ac"},
}

PLOTLY, PLOTLY_DATA = "plotly.min.js", "application/vnd.plotly.v1+json"

# Pages of the repository's root that are included in pages of the site.
INCLUDED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"'](?:https?:)?//[^>]*>|<link\b[^>]*\bhref=[\"'](?:https?:)?//[^>]*>"
)


def lead_on(text: str, written_in: str, shown_in: str) -> str:
    """Links that work between files of the repository, made to work on the site.

    What is no page of the site is linked to in the repository.
    """

    def lead(match: re.Match[str]) -> str:
        target = normpath(f"{dirname(written_in) or '.'}/{match[1]}")
        page = INCLUDED.get(target) or target.removeprefix("docs/")
        if target in INCLUDED or (target.startswith("docs/") and (DOCS / page).is_file()):
            return relpath(page, dirname(shown_in) or ".")
        if not (ROOT / target).exists():
            return match[1]  # Sphinx says so
        return f"{REPOSITORY}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}"

    return "".join(part if i % 2 else LINK.sub(lead, part) for i, part in enumerate(FENCE.split(text)))


def on_source(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = lead_on(source[0], f"docs/{name}.md", f"{name}.md")
    if app.env.doc2path(name).suffix == ".ipynb":
        source[0] = draw_plotly(source[0], name)


def draw_plotly(text: str, name: str) -> str:
    """The notebook with a script for each Plotly figure, which is stored as data. Its library is among our files."""
    notebook = json.loads(text)
    library = f'<script src="{relpath(f"_static/{PLOTLY}", dirname(name) or ".")}"></script>'
    for cell in notebook["cells"]:
        for number, output in enumerate(cell.get("outputs", [])):
            if figure := output.get("data", {}).get(PLOTLY_DATA):
                place = f"plotly-{cell['id']}-{number}"
                figure["layout"].pop("template", None)
                figure["layout"]["font"] = {"color": "#808890"}  # is read on light and on dark pages
                for axis in (value for key, value in figure["layout"].items() if key[1:].startswith("axis")):
                    axis.setdefault("gridcolor", "#80889040")
                    axis.setdefault("zerolinecolor", "#80889040")
                figure["config"] = {"displayModeBar": False, "responsive": True}
                drawn = json.dumps(figure).replace("</", "<\\/")
                output["data"] = {
                    "text/html": f'{library}<div id="{place}"></div><script>Plotly.newPlot("{place}", {drawn})</script>'
                }
                library = ""  # the next figures have it already
    return json.dumps(notebook)


def on_builder(app: Sphinx) -> None:
    """Plotly's script, as the installed package has it, so that no page fetches it."""
    from plotly import offline

    if app.builder.format == "html":
        static = Path(app.outdir) / "_static"
        static.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(offline.__file__).parent.parent / "package_data" / PLOTLY, static / PLOTLY)


def on_include(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    content[0] = lead_on(content[0], (DOCS / path).resolve().relative_to(ROOT).as_posix(), f"{parent}.md")


def on_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Write as Sphinx wants it what the code writes plainly: examples are indented, and that is all."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # else napoleon takes the words before a colon for a type
    text = "\n".join(lines)
    text = re.sub(
        r"^Examples?:\n+(?=    )", ".. rubric:: Example\n\n.. code-block:: pycon\n\n", text, flags=re.MULTILINE
    )
    if what == "module":
        text = re.sub(r"(?<=\n\n)(?=    \S)(?<!    )", ".. code-block:: python\n\n", text, count=1)
    lines[:] = text.split("\n")


def on_signature(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Defaults that are no Python when printed: functions by their name, others as `...`."""
    named = re.sub(r"<function (?:[^ >]*\.)?(\w+) at [^>]*>", r"\1", signature or "")
    return re.sub(r"= <.*?>+(?=[,)])", "= ...", named) or None, returns


def on_built(app: Sphinx, exception: Exception | None) -> None:
    """Refuse pages that would fetch a script, a font or a picture when they are read."""
    for page in Path(app.outdir).rglob("*.html") if exception is None else ():
        if found := FETCHED.search(page.read_text()):
            raise ExtensionError(f"{page.name} fetches from the network when it is read: {found[0]}")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", on_source)
    app.connect("builder-inited", on_builder)
    app.connect("include-read", on_include)
    app.connect("autodoc-process-docstring", on_docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", on_signature)
    app.connect("build-finished", on_built)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
