"""`speedrun.py` and `diffusion.py` with their recipe files: the three frameworks agree within S21.

Each framework's tests run in a process of their own, so the curves of one (torch, on a CPU) stand here.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp

EXAMPLES = Path(__file__).parents[2] / "examples"
CURVES = {
    "speedrun": (
        [3.6194837, 3.559603, 3.4703426, 3.3584173, 3.2142551, 3.0760274, 3.0323379, 2.861814, 2.8082538, 2.6662595],
        [3.6194756, 3.5596356, 3.4704192, 3.3585768, 3.2143464, 3.0759826, 3.0324249, 2.8617699, 2.8079045, 2.6662357],
    ),
    "diffusion": (
        [1.3255323, 1.2450631, 1.332345, 1.2430034, 1.3185999, 1.2687362, 1.1899068, 1.1631138, 1.14976, 1.1229898],
        [1.3255423, 1.2450924, 1.3323236, 1.2430198, 1.3186051, 1.2687511, 1.1898956, 1.1631356, 1.1497675, 1.1229851],
    ),
}
"""Example -> the losses of ten steps in float32, and under the recipe's own policy."""
PROMISES = {
    "speedrun": r"loss 3\.6195 -> 1\.\d+, muon 8 matrices, adamw 21, trained \d\.\d+, averaged \d\.\d+",
    "diffusion": r"(?:[ .:*#]{16}\n){8}loss 1\.\d+ -> 0\.\d+, mean -0\.\d+, deviation \d\.\d+",
}


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative distance of two curves."""
    return float(np.max(np.abs(np.subtract(one, other)) / np.asarray(other)))


@pytest.mark.parametrize("name", CURVES)
def test_s21_the_recipe_is_one_in_all_frameworks(
    framework: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the example runs. Mixed curves are no further apart than twice the larger of their distances from float32."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example: Any = importlib.import_module(name)
    recipe, (float32, mixed) = polyamp.Recipe.load(example.RECIPE), CURVES[name]
    _, plain = example.train(framework, recipe.replace(policy="float32"), len(float32))
    assert apart(plain, float32) < 2.5e-5
    _, own = example.train(framework, recipe, len(mixed))
    assert apart(own, mixed) <= 2 * max(apart(own, plain), apart(mixed, float32))
    steps = {"speedrun": "40", "diffusion": "200"}[name]
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--framework", framework, "--steps", steps])
    example.main()
    assert re.fullmatch(PROMISES[name], capsys.readouterr().out.strip("\n"))
