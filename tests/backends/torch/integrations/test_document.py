"""docs/guides/torch_integrations.md, and monitor.md of these libraries, tell the truth: their Python blocks run and
print what their text blocks show.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).parents[4]
DOCUMENT = (ROOT / "docs" / "guides" / "torch_integrations.md").read_text(encoding="utf-8")
MONITOR = (ROOT / "docs" / "guides" / "monitor.md").read_text(encoding="utf-8")
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


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_the_blocks_of_the_monitor_print_the_text_blocks(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", MONITOR, re.MULTILINE | re.DOTALL)
    ((code, printed),) = [pair for pair in pairs if f"from polyamp_torch.{library} import" in pair[0]]
    try:
        exec(compile(code, "docs/guides/monitor.md", "exec"), {"__name__": "document"})
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert printed in capsys.readouterr().out
    if library == "lightning":
        (path,) = tmp_path.glob("runs/**/metrics.csv")
        columns = path.read_text().splitlines()[0].split(",")
        assert {"polyamp/loss_scale", "polyamp/gradients/net/0/underflow"} <= set(columns)
