"""docs/guides/serving.md: the blocks of each framework run in a process of their own, torch's, which write the files,
first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python ?(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
"""(framework, text) of each block."""


def test_the_blocks_of_each_framework_run_and_the_exported_programs_agree(tmp_path: Path) -> None:
    counts = {"torch": 3, "tensorflow": 2, "jax": 2}
    assert [framework for framework, _ in BLOCKS if framework not in counts] == []
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for framework, count in counts.items():
        blocks = [text for only, text in BLOCKS if only == framework]
        assert len(blocks) == count
        script = tmp_path / f"serve_{framework}.py"
        script.write_text("\n".join([*blocks, "print(difference)"]), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", str(script)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{framework}: {done.stderr}"
        assert float(done.stdout.split()[-1]) < 1e-6, framework  # the page: 4e-7
    assert {file.name for file in tmp_path.iterdir()} >= {"classifier.pt2", "served", "classifier.jax", "served16"}
