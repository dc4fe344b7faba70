"""Models of transformers move to keras.applications and to flax's examples, as the page on public models shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.porting.public.page import PAGE, blocks

ROOT: Final = Path(__file__).parents[3]
OUTPUTS, GRADIENTS = 1e-5, 1e-4
SECTIONS: Final = {
    "To keras.applications": {"MobileNetV2": (105, ["momentum", "padding"]), "ConvNeXt": (100, [])},
    "To flax": {"GPT-2": (13, []), "ViT": (15, []), "ResNet": (31, [])},
}
"""Section -> heading -> layers that move, and attributes that differ."""


@pytest.mark.parametrize("section", SECTIONS)
def test_the_blocks_move_public_models(section: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    paths = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.porting.public", section],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(SECTIONS[section])
    for heading, (layers, differences) in SECTIONS[section].items():
        each = found[heading]
        assert each["layers"] == layers, heading
        assert each["untouched"] == [], heading
        assert 0 < each["outputs"] <= OUTPUTS, heading
        assert 0 < each["gradients"] <= GRADIENTS, heading
        assert each["differences"] == differences, heading


def test_every_block_of_the_page_is_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(re.findall(r"^```python$", text, re.MULTILINE)) == sum(len(blocks(section)) for section in SECTIONS)
