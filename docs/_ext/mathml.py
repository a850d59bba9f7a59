"""
Formulas as MathML, which browsers draw themselves: no script, no network, no LaTeX.

docutils has the translator; Sphinx does not offer it. A formula that it cannot translate is a
warning with its place, and warnings are errors here.
"""

import re
from xml.etree import ElementTree as ET

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)
_MATHML = "http://www.w3.org/1998/Math/MathML"

# docutils knows aligned, inside of a formula; the others say the same of a formula of its own.
_OUTER = re.compile(r"\\(begin|end)\{(?:align|gather|split|eqnarray|equation)(\*?)\}")


# The only entity that the translator writes, which XML does not know.
_APPLY = ("&ApplyFunction;", "\N{FUNCTION APPLICATION}")


def _name(element):
    """Return the local name of an element and of what it puts an index or an accent on."""
    while (name := element.tag.rpartition("}")[2]) in ("msub", "msup", "msubsup", "mover"):
        element = element[0]
    return name, (element.text or "").strip()


def _is_word(element):
    name, text = _name(element)
    return name in ("mi", "mtext") and len(text) > 1 and text.isalpha()


def _is_factor(element):
    name, text = _name(element)
    return name in ("mi", "mtext", "mn", "mfrac", "msqrt", "mrow") or text in (")", "|", "]")


def _is_parenthesized(element):
    r"""Tell whether an element is what \bigl( and \bigr) make: a row that begins with a parenthesis."""
    return _name(element)[0] == "mrow" and len(element) > 0 and _name(element[0])[1] == "("


def _space(root):
    """Put a thin space between a word, such as mean or rstd, and a factor beside it."""
    for parent in root.iter():
        children = list(parent)
        if parent.tag.rpartition("}")[2] not in ("math", "mrow", "mtd", "mstyle", "msqrt"):
            continue
        for i in range(len(children) - 1, 0, -1):
            before, after = children[i - 1], children[i]
            if _name(before)[1] == "\N{FUNCTION APPLICATION}":
                # An operator's name and its argument, unless that is in parentheses.
                needs_space = _is_factor(after) and not _is_parenthesized(after)
            else:
                needs_space = _is_factor(before) and _is_word(after)
                needs_space |= _is_word(before) and _is_factor(after) and _name(after)[0] != "mo"
            if needs_space:
                parent.insert(i, ET.Element(f"{{{_MATHML}}}mspace", width="0.1667em"))


def _repair(mathml):
    r"""
    Put the index of \hat{x}_i beside x, and thin spaces around words.

    docutils 0.22 makes a munderover of it, the index under x, as under a sum. An operator that does not
    stretch as its last part tells an accent.
    """
    ET.register_namespace("", _MATHML)
    root = ET.fromstring(mathml.replace(*_APPLY))
    for both in root.iter(f"{{{_MATHML}}}munderover"):
        base, index, accent = both
        if accent.get("stretchy") == "false":
            for part in (base, index, accent):
                both.remove(part)
            both.tag = f"{{{_MATHML}}}msub"
            over = ET.SubElement(both, f"{{{_MATHML}}}mover", accent="true")
            over.extend([base, accent])
            both.append(index)
    _space(root)
    return ET.tostring(root, encoding="unicode")


def translate(formula, *, as_block):
    """Return the MathML of a formula in LaTeX; ValueError if it cannot be translated."""
    formula = re.sub(r"\\dots(?![a-z])", r"\\ldots", formula)
    formula = re.sub(r"\\(begin|end)\{equation\*?\}", "", formula)
    formula = _OUTER.sub(r"\\\1{aligned}", formula)
    if as_block and r"\\" in formula and r"\begin" not in formula:
        formula = rf"\begin{{aligned}}{formula}\end{{aligned}}"
    try:
        return _repair(tex2mathml(formula, as_block=as_block))
    except Exception as error:
        # What the translator raises on bad input is of several types, some without a message.
        msg = f"a formula must be what docutils can translate, got {formula!r}: {error}"
        raise ValueError(msg) from error


def _written(node, *, as_block):
    try:
        return translate(node.astext(), as_block=as_block)
    except ValueError as error:
        _LOGGER.warning("%s", error, location=node)
        return f"<code>{node.astext()}</code>"


def _visit_inline(writer, node):
    writer.body.append(_written(node, as_block=False))
    raise nodes.SkipNode


def _visit_block(writer, node):
    writer.body.append(writer.starttag(node, "div", CLASS="math"))
    writer.body.append(_written(node, as_block=True))
    writer.body.append("</div>")
    raise nodes.SkipNode


def setup(app):
    """Register the renderer; `html_math_renderer = "mathml"` chooses it."""
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
