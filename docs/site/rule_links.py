"""A Sphinx extension: a rule's number in a text, as in "(S12)", is a link to the rule in `semantics.md`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from source_pages import rule_anchors
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

_NUMBER: Final = re.compile(r"\bS(?:[1-9]|[12]\d|3\d)\b")
_PAGE: Final = "semantics"
_NO_LINK: Final = (nodes.literal, nodes.literal_block, nodes.reference, nodes.title, nodes.raw)


class RuleLinks(SphinxPostTransform):
    """Replaces the numbers in a page's text by references."""

    default_priority = 900

    def run(self, **kwargs: Any) -> None:
        """Change the document in place."""
        anchors = self.app.env.rule_anchors
        here = self.env.docname == _PAGE
        page = "" if here else self.app.builder.get_relative_uri(self.env.docname, _PAGE)
        for text in list(self.document.findall(nodes.Text)):
            if _is_inside(text, _NO_LINK):
                continue
            parts: list[nodes.Node] = []
            at = 0
            for match in _NUMBER.finditer(text):
                if match.group() in anchors:
                    parts.append(nodes.Text(text[at : match.start()]))
                    uri = f"{page}#{anchors[match.group()]}"
                    parts.append(nodes.reference("", match.group(), internal=True, refuri=uri, classes=["rule"]))
                    at = match.end()
            if parts and text.parent is not None:
                text.parent.replace(text, [*parts, nodes.Text(text[at:])])


def _is_inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, kinds):
            return True
        parent = parent.parent
    return False


def _read_anchors(app: Sphinx) -> None:
    text = (Path(app.srcdir) / f"{_PAGE}.md").read_text(encoding="utf-8")
    app.env.rule_anchors = rule_anchors(text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform."""
    app.connect("builder-inited", _read_anchors)
    app.add_post_transform(RuleLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
