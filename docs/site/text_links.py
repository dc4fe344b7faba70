"""A Sphinx extension that makes links of what a text names.

A rule's number, as in "(S12)", leads to the page of the rule. A public name in code, as in `polyamp.init` or
`polyamp.save(state, path)`, leads to the reference; the reference's own pages name things without `polyamp.` too.
"""

from __future__ import annotations

import re
from typing import Any, Final

from docutils import nodes
from source_pages import DOCS, rule_page, rules
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

_NUMBER: Final = re.compile(r"\bS(?:[1-9]|[12]\d|3\d)\b")
_NAME: Final = re.compile(r"([A-Za-z_][\w.]*)(?:\(.*\))?")
_API: Final = "reference/api/"
_NO_LINK: Final = (nodes.literal_block, nodes.reference, nodes.title, nodes.raw)


class TextLinks(SphinxPostTransform):
    """Replaces rule numbers and public names in a page's text by references."""

    default_priority = 900  # after the references that a page has written itself

    def run(self, **kwargs: Any) -> None:
        """Change the document in place."""
        for literal in list(self.document.findall(nodes.literal)):
            uri = None if _is_inside(literal, _NO_LINK) else self._uri_of_name(literal.astext())
            if uri is not None:
                reference = nodes.reference("", "", internal=True, refuri=uri)
                literal.replace_self(reference)
                reference += literal
        anchors = self.app.env.rule_anchors
        for text in list(self.document.findall(nodes.Text)):
            if _is_inside(text, (*_NO_LINK, nodes.literal)):
                continue
            parts: list[nodes.Node] = []
            at = 0
            for match in _NUMBER.finditer(text):
                if match.group() in anchors:
                    uri = self._uri(*anchors[match.group()])
                    parts.append(nodes.Text(text[at : match.start()]))
                    parts.append(nodes.reference("", match.group(), internal=True, refuri=uri, classes=["rule"]))
                    at = match.end()
            if parts:
                text.parent.replace(text, [*parts, nodes.Text(text[at:])])

    def _uri_of_name(self, text: str) -> str | None:
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        objects = self.app.env.get_domain("py").objects
        names = [match[1]]
        if self.env.docname.startswith(_API):
            names.append(f"polyamp.{match[1]}")
        for name in names:
            if name.startswith("polyamp") and name in objects:
                return self._uri(objects[name].docname, objects[name].node_id)
        return None

    def _uri(self, page: str, anchor: str) -> str:
        here = self.env.docname
        return f"#{anchor}" if page == here else f"{self.app.builder.get_relative_uri(here, page)}#{anchor}"


def _is_inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, kinds):
            return True
        parent = parent.parent
    return False


def _read_anchors(app: Sphinx) -> None:
    text = (DOCS / "semantics.md").read_text(encoding="utf-8")
    app.env.rule_anchors = {f"S{number}": (rule_page(number), anchor) for number, _, anchor in rules(text)}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform."""
    app.connect("builder-inited", _read_anchors)
    app.add_post_transform(TextLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
