"""The code of `docs/guides/torch_step.md` runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[4] / "docs" / "guides" / "torch_step.md"


def test_the_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), PAGE.name, "exec"), {})
