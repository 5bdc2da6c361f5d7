"""Sphinx's configuration: `make docs` builds the site in build/docs."""

import re

from docutils.nodes import SkipNode, math_block
from docutils.utils.math.latex2mathml import tex2mathml

from fedhet import __version__

project = "fedhet"
author = "The fedhet maintainers"
copyright = f"2026, {author}"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_fence_as_directive = ["math"]  # as GitHub shows formulas
myst_heading_anchors = 4  # the anchors of headings are GitHub's

default_role = "code"  # docstrings put names between single backticks
napoleon_numpy_docstring = False  # docstrings follow Google's style
autodoc_typehints = "description"  # types stand in the lists of parameters, which has room for them
autodoc_member_order = "bysource"

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "fedhet"
html_theme_options = {"top_of_page_buttons": []}

# `make docs-links` asks the web; what lies in docs/ is checked by every build.
linkcheck_timeout = 20
linkcheck_retries = 2


def _plain(app, what, name, obj, options, lines):
    """Escape asterisks in docstrings, other than those in code, so that they are no markup."""
    kind = next((line for line in lines if line.startswith(":type: ")), None)
    if kind and what in ("attribute", "data", "property"):
        # Napoleon reads "A row per round: means and costs" as a type and a description.
        lines.remove(kind)
        lines[0] = f"{kind.removeprefix(':type: ')}: {lines[0]}"
    code_at = None  # the indentation of the line that introduces a block of code
    for number, line in enumerate(lines):
        indentation = len(line) - len(line.lstrip())
        if code_at is not None and line.strip() and indentation <= code_at:
            code_at = None
        if code_at is None:
            lines[number] = re.sub(r"(?<!\\)\*", r"\\*", line)
            code_at = indentation if line.endswith("::") else None


def _formula(translator, node):
    """Write a formula as MathML, which browsers show without a script from the web."""
    tag = "p" if isinstance(node, math_block) else "span"
    formula = tex2mathml(node.astext(), as_block=tag == "p")
    translator.body.append(f'<{tag} style="overflow-x: auto">{formula}</{tag}>')
    raise SkipNode


def setup(app):
    """Connect what Sphinx calls while it builds."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("autodoc-process-docstring", _plain)
