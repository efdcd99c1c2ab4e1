"""The site's configuration: `python -m sphinx -W -b html docs docs/_build/html`.

Building needs no network, nor does reading.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]  # so that it is this checkout which is described

import hf_osdp  # noqa: E402

project = "hf_osdp"
version = release = hf_osdp.__version__
copyright = "the hf_osdp authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
default_role = "code"  # docstrings write names in single backticks
smartquotes = False  # options begin with two dashes
pygments_style, pygments_dark_style = "friendly", "monokai"  # which tell the lines of a diff apart
add_module_names = False
nitpicky = True
nitpick_ignore_regex = [
    (r"py:(class|exc)", r"(?!hf_osdp\.\w+$).*")
]  # types of other packages, and of ours that are not public

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}
napoleon_google_docstring, napoleon_numpy_docstring = True, False

html_theme = "furo"
html_title = f"hf_osdp {release}"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_math_renderer = "mathml"

PAGES = {
    "README.md": "index.md",
    "recipes/README.md": "recipes.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files of the repository, and sections of them, that are pages of the site though they do not lie here."""
_COLON = "\ue000"
_FENCE = re.compile(r"^(?P<indent>\s*)```(?P<language>\w*)$")
_INCLUDE = re.compile(r"```\{include\} (?P<path>\S+)\n(?P<options>(?::[\w-]+: .*\n)*)```")
_OPTION = re.compile(r':(?P<name>[\w-]+): "(?P<value>.*)"')
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)#]+)(?P<section>#[^)]*)?\)")


def include_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put in files of the repository that lie elsewhere, and lead links to the site's pages."""
    source[0] = _with_links(source[0], DOCS)

    def content(include: re.Match) -> str:
        path = DOCS / include["path"]
        app.env.note_included(str(path))
        app.env.note_dependency(str(path))
        text, options = path.read_text(encoding="utf-8"), dict(_OPTION.findall(include["options"]))
        for name, side in ("start-after", 1), ("end-before", 0):
            if name in options:
                parts = text.split(options[name], 1)
                if len(parts) < 2:
                    raise ExtensionError(
                        f"{docname}.md includes {path.name} with {name} {options[name]!r}, which is not in it."
                    )
                text = parts[side]
        return _with_links(text, path.parent)

    source[0] = _INCLUDE.sub(content, source[0])


def _with_links(text: str, folder: Path) -> str:
    """Links to pages lead there; of files that are no pages the path is shown."""

    def page(link: re.Match) -> str:
        target, section = (folder / link["path"]).resolve(), link["section"] or ""
        if target.is_relative_to(DOCS):
            return f"[{link['text']}]({os.path.relpath(target, DOCS)}{section})"
        name = os.path.relpath(target, ROOT)
        if found := PAGES.get(name + section):
            return f"[{link['text']}]({found})"
        if found := PAGES.get(name):
            return f"[{link['text']}]({found}{section})"
        return f"{link['text']} (`{name}`)"

    return _LINK.sub(page, text)


def markdown_in_docstrings(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings have their examples in Markdown fences; reStructuredText wants a directive and an indent."""
    converted, inside = [], False
    for line in lines:
        if fence := _FENCE.match(line):
            inside = not inside
            converted += [f"{fence['indent']}.. code-block:: {fence['language']}", ""] if inside else [""]
        else:
            converted.append(f"    {line}" if inside and line else line)
    lines[:] = converted


def hide_colons(app, what, name, obj, options, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in an attribute's first line for its type; here types are
    annotations.
    """
    if what in ("attribute", "property"):
        lines[:1] = [line.replace(":", _COLON) for line in lines[:1]]


def show_colons(app, what, name, obj, options, lines: list[str]) -> None:
    """After napoleon."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def public_name(app: Sphinx, env, node, contnode):
    """Where a public type is defined in a module of its own, to its place in the reference."""
    module, _, name = node.get("reftarget", "").rpartition(".")
    if node.get("refdomain") != "py" or not module.startswith("hf_osdp.") or name not in hf_osdp.__all__:
        return None
    python = env.domains["py"]
    return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], f"hf_osdp.{name}", node, contnode)


def write_block(self, node: nodes.math_block) -> None:
    """A formula by itself, as MathML, which browsers show without a script."""
    self.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def write_inline(self, node: nodes.math) -> None:
    """A formula in a line."""
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("source-read", include_files)
    app.connect("autodoc-process-docstring", markdown_in_docstrings)
    app.connect("autodoc-process-docstring", hide_colons, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", show_colons, priority=600)
    app.connect("missing-reference", public_name)
    app.add_html_math_renderer("mathml", inline_renderers=(write_inline, None), block_renderers=(write_block, None))
