"""docs/guides/torch_integrations.md tells the truth: its Python blocks run and print what its text blocks show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
DOCUMENT = (ROOT / "docs" / "guides" / "torch_integrations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
"""(language, text) of every fenced block."""


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "text"}


# Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates, and advises more workers for loaders.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
def test_python_blocks_run_in_order_and_print_the_text_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {"__name__": "document"}
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "docs/guides/torch_integrations.md", "exec"), scope)
        else:
            assert text in capsys.readouterr().out
