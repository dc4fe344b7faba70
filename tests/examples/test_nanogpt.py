"""`nanogpt.py` and its recipe file: the three frameworks agree within S21, and mean the same by its groups and aliases.

Each framework's tests run in a process of their own, so the curves of one (torch, on a CPU) stand here.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp

EXAMPLES = Path(__file__).parents[2] / "examples"
FLOAT32 = [3.6194837, 3.6184795, 3.5121458, 3.4018884, 3.2372379, 3.0459504, 3.3036919, 2.8953304, 2.8717694, 2.7460098]
MIXED = [3.6194901, 3.6184835, 3.5121346, 3.4018693, 3.2372465, 3.0459976, 3.3007779, 2.896385, 2.8723092, 2.7468762]
"""The losses of ten steps in float32, and under the recipe's mixed_bfloat16."""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("nanogpt")


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative distance of two curves."""
    return float(np.max(np.abs(np.subtract(one, other)) / np.asarray(other)))


def test_s21_nanogpts_recipe_is_one_in_all_frameworks(
    framework: str, example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the example runs. The float32 curves of two frameworks agree to 5e-5; mixed ones are no further apart than
    twice the larger of their distances from float32."""
    recipe = polyamp.Recipe.load(example.RECIPE)
    _, float32 = example.train(framework, recipe.replace(policy="float32"), len(FLOAT32))
    assert apart(float32, FLOAT32) < 2.5e-5
    monkeypatch.setattr("sys.argv", ["nanogpt.py", "--framework", framework, "--steps", "20"])
    mixed: list[float] = []
    train = example.train

    def watched(*args: Any) -> Any:
        state, losses = train(*args)
        mixed.extend(losses[: len(MIXED)])
        return state, losses

    monkeypatch.setattr(example, "train", watched)
    example.main()
    assert capsys.readouterr().out.strip().endswith("decayed 11 of 29 parameters")
    assert mixed[-1] < 0.8 * mixed[0]
    assert apart(mixed, MIXED) <= 2 * max(apart(mixed, float32), apart(MIXED, FLOAT32))


def test_s27_its_groups_and_aliases_mean_the_same_everywhere(framework: str, example: Any) -> None:
    """Decay on matrices and tables alone; half the rate in the first block, whatever its path is; a head in float32."""
    recipe = polyamp.Recipe.load(example.RECIPE)
    state = polyamp.init(example.MODELS[framework](), recipe)
    groups: Any = state.groups
    members = groups.each()
    assert len(members) == len(example.weights()) == 29
    assert sum(member.spec.weight_decay == 0.1 for member in members) == 2 + 4 * example.BLOCKS + 1
    first = [path for path in groups.numbers if groups.of(path).scale == 0.5]
    assert len(first) == 12
    inside = {"torch": "transformer/h/0/", "tensorflow": "block/", "jax": "h_0/"}[framework]
    assert all(path.startswith(inside) for path in first)
    assert {member.spec.betas for member in members} == {(0.9, 0.95)}
    blocks = {"torch": "transformer/h", "tensorflow": "block_0", "jax": "h_0"}[framework]
    head = "head" if framework == "tensorflow" else "lm_head"
    first_block = f"{blocks}/0" if framework == "torch" else blocks
    plan = recipe.policy.plan([head, first_block], backend=framework)
    assert (plan.at(head).dtype, plan.at(first_block).dtype) == ("float32", "bfloat16")
