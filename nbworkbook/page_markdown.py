"""Text of a notebook as HTML, its formulas as MathML, which a browser draws without a script.

nbconvert's own renderer leaves formulas as LaTeX, for MathJax from the network to draw.
latex2mathml writes them as MathML once, when the page is made. A formula that it cannot read stays
LaTeX, as code; a command that it does not have stands there by its name.

Footgun: a dollar sign begins a formula. Two prices in one line, "$5 and $6", are one; write `\\$5`.
"""

import html
import re
from typing import Any

import jinja2
from latex2mathml.converter import convert
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

COMMAND = re.compile(r"\\(?=[A-Za-z])")  # the backslash of one that was left


class _Renderer(IPythonRenderer):
    """nbconvert's renderer, with formulas drawn."""

    def block_math(self, body: str) -> str:
        """Return a formula on a line of its own."""
        return mathml(body, "block")

    def inline_math(self, body: str) -> str:
        """Return a formula in the text."""
        return mathml(body, "inline")

    def latex_environment(self, name: str, body: str) -> str:
        """Return `\\begin{name} body \\end{name}`."""
        return mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")


def mathml(latex: str, display: str) -> str:
    """Return a formula as MathML, block or inline, or as code where it cannot be read."""
    if not latex.strip():
        return ""
    try:
        # \arg\min comes as "\argmin", and what is no command at all with its backslash too
        return COMMAND.sub("", convert(latex, display=display))
    except Exception:  # of any type: whatever the library makes of what is no formula
        return f"<code>{html.escape(latex)}</code>"


@jinja2.pass_context
def markdown_to_html(context: Any, source: str) -> str:
    """Return a cell's text as HTML; a filter of nbconvert's templates, in place of its own."""
    attachments = context.get("cell", {}).get("attachments", {})
    renderer = _Renderer(escape=False, attachments=attachments)
    return MarkdownWithMath(renderer=renderer).render(source)
