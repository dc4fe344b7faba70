"""`nanogpt.py` and its recipe file: the three frameworks agree within S21, and mean the same by its groups and aliases.

Each framework's tests run in a process of their own, so the curves of one (torch, on a CPU) stand here.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp

EXAMPLES = Path(__file__).parents[2] / "examples"
FLOAT32 = [3.6194837, 3.5234864, 3.4060097, 3.2627578, 3.1435456, 2.9628363, 2.9654245, 2.9069037, 2.7276521, 2.547188]
MIXED = [3.6194901, 3.5234716, 3.406064, 3.2629218, 3.1441221, 2.9614108, 2.9613166, 2.946275, 2.7221169, 2.5323489]
"""The losses of ten steps in float32, and under the recipe's mixed_bfloat16."""
BY_HAND = [3.6194837, 3.5183549, 3.411943, 3.2755637, 3.104846, 2.9502044, 3.0192156, 2.8157125, 3.0183122, 2.7132072]
"""The losses of `by_hand`, in float32."""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("nanogpt")


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative distance of two curves."""
    return float(np.max(np.abs(np.subtract(one, other)) / np.asarray(other)))


def nanogpt_rate(count: int, peak: float = 2e-2, warmup_steps: int = 5, total_steps: int = 60) -> float:
    """`get_lr` of github.com/karpathy/nanoGPT, train.py, with the numbers of the recipe file."""
    if count < warmup_steps:
        return peak * (count + 1) / (warmup_steps + 1)
    ratio = (count - warmup_steps) / (total_steps - warmup_steps)
    return 0.1 * peak + 0.5 * (1.0 + math.cos(math.pi * ratio)) * 0.9 * peak


def by_hand(example: Any, steps: int) -> list[float]:
    """nanoGPT's loop on the example's model and batches: its `get_lr`, its two groups, two micro-batches, its clip."""
    import torch

    model = example.torch_gpt()
    groups = [[p for p in model.parameters() if (p.dim() >= 2) is matrix] for matrix in (True, False)]
    options = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(options, betas=(0.9, 0.95))
    losses = []
    for count, batch in enumerate(example.batches(steps)):
        for group in optimizer.param_groups:
            group["lr"] = nanogpt_rate(count)
        total = 0.0
        for x, y in zip(np.split(batch["x"], 2), np.split(batch["y"], 2), strict=True):
            logits, labels = model(torch.from_numpy(x)), torch.from_numpy(y).long()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_s13_the_recipe_trains_as_nanogpts_own_loop(framework: str, example: Any) -> None:
    """Without the group by path, which is not nanoGPT's. A warmup that began at a rate of 0 would be 2.7e-2 away."""
    recipe = polyamp.Recipe.load(example.RECIPE)
    groups = recipe.optimizer.groups[:1]
    recipe = recipe.replace(policy="float32", optimizer=recipe.optimizer.replace(groups=groups))
    _, losses = example.train(framework, recipe, len(BY_HAND))
    limit = 5e-5 if framework == "tensorflow" else 2.5e-5  # 4.3e-5 with AVX2 alone: S21's for two frameworks
    assert apart(losses, BY_HAND) < limit
    if framework == "torch":
        assert apart(by_hand(example, len(BY_HAND)), BY_HAND) < 2.5e-5  # processors add up in other orders


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
