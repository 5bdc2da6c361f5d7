"""Sphinx's configuration: `make docs` builds the site in build/docs."""

from docutils.nodes import SkipNode, math_block
from docutils.utils.math.latex2mathml import tex2mathml

from fedhet import __version__

project = "fedhet"
author = "The fedhet maintainers"
copyright = f"2026, {author}"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_fence_as_directive = ["math"]  # as GitHub shows formulas
myst_heading_anchors = 4  # the anchors of headings are GitHub's

default_role = "code"  # docstrings put names between single backticks
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "fedhet"
html_theme_options = {"top_of_page_buttons": []}

# `make docs-links` asks the web; what lies in docs/ is checked by every build.
linkcheck_timeout = 20
linkcheck_retries = 2


def _plain(app, what, name, obj, options, lines):
    """Show the asterisks of docstrings, which are plain text, as they are."""
    lines[:] = [line.replace("*", r"\*") for line in lines]


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
