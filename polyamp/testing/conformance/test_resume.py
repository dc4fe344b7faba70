"""Rule S22: save, restore in a new process, continue: bit-identical to not stopping."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polyamp
from polyamp.backend import Backend
from polyamp.errors import CheckpointError
from polyamp.testing.conformance import resume
from polyamp.testing.conformance.problems import layers, recipe, unmoved
from polyamp.testing.harness import Harness


@pytest.mark.parametrize("kind", resume.KINDS)
def test_s22_resume_is_bit_identical(backend: Backend, tmp_path: Path, kind: str) -> None:
    state = resume.advance(resume.fresh(backend.name, kind, seed=0), 0, 6)
    path, output = tmp_path / "checkpoint.safetensors", tmp_path / "resumed.npz"
    polyamp.save(state, path)
    straight = backend.export_state(resume.advance(state, 6, 12))
    arguments = [backend.name, kind, str(path), str(output)]
    subprocess.run([sys.executable, "-m", resume.__name__, *arguments], check=True, timeout=300)
    with np.load(output) as resumed:
        assert set(resumed) == set(straight)
        different = [name for name in straight if straight[name].tobytes() != resumed[name].tobytes()]
    assert different == []


def test_s22_a_checkpoint_of_another_model_is_refused(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    polyamp.save(polyamp.init(harness.mlp(layers((4, 5, 3))), recipe()), path)
    state = polyamp.init(harness.mlp(layers()), recipe())
    before = backend.export_state(state)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        polyamp.restore(state, path)
    deeper = polyamp.init(harness.mlp(layers((4, 5, 5, 3))), recipe())
    with pytest.raises(CheckpointError, match="missing: "):
        polyamp.restore(deeper, path)
    assert unmoved(before, backend.export_state(state)) == []


def test_s22_a_damaged_checkpoint_changes_nothing(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    polyamp.save(polyamp.init(harness.mlp(layers(seed=1)), recipe()), path)
    content = path.read_bytes()
    state = polyamp.init(harness.mlp(layers()), recipe())
    before = backend.export_state(state)
    flipped = bytearray(content)
    flipped[-5] ^= 1
    for damaged in (bytes(flipped), content[:-7], content[: len(content) // 2], content[:4], b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            polyamp.restore(state, path)
        assert unmoved(before, backend.export_state(state)) == []
