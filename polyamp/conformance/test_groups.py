"""Rule S27: parameter groups by path and kind, and modules named by aliases (S5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import Group, no_decay, schedules
from polyamp.conformance.problems import batch, changed_arrays, flat_weights, layers, loss_fn, recipe, train
from polyamp.conformance.test_skipping import OPTIMIZERS
from polyamp.conformance.test_unused import loss_of_both, loss_of_first, second_branch_arrays, two_branches
from polyamp.contract import registry
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import CheckpointError, PolyampError

GROUPS = [
    *no_decay("bias"),
    Group("**/dense0", learning_rate_scale=0.5),
    Group("**/dense1/**", kind="bias", learning_rate=schedules.linear_warmup(0.1, 4)),
]


def hyperparameters_by_end(state: Any) -> dict[str, Any]:
    """End of a parameter's path, "dense0/kernel" or "dense0/bias" -> the hyperparameters it has."""
    found = {}
    for path in state.groups.numbers:
        *_, module, name = path.split("/")
        found[f"{module}/{'bias' if name == 'bias' else 'kernel'}"] = state.groups.of(path)
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_s27_groups_train_as_the_reference_does(backend: Backend, harness: Harness, optimizer: Any) -> None:
    """With accumulation, clipping, schedules and a skipped step: rates, scales and decay of each parameter."""
    made = recipe(
        optimizer=optimizer.replace(weight_decay=0.3, groups=GROUPS),
        scaler=polyamp.LossScaler(init_scale=16.0),
        clip_norm=1.0,
        accumulate_steps=2,
    )
    batches = [batch(i, gain=np.inf if i == 2 else 1.0) for i in range(5)]
    state, results = train(harness, made, batches)
    oracle = registry.get("reference").testing()
    expected, _ = train(oracle, made, batches)
    assert [bool(backend.to_numpy(result.skipped)) for result in results] == [False, False, True, False, False]
    np.testing.assert_allclose(flat_weights(harness, state), flat_weights(oracle, expected), rtol=0, atol=2e-6)
    plain, _ = train(oracle, made.replace(optimizer=optimizer.replace(weight_decay=0.3)), batches)
    assert np.min(np.abs(flat_weights(oracle, plain) - flat_weights(oracle, expected))[:8]) > 1e-4, (
        "the groups do something"
    )


def test_s27_each_hyperparameter_is_decided_by_itself(backend: Backend, harness: Harness) -> None:
    """A kind before none, then the longest glob, then the later group; two groups may serve one parameter."""
    groups = [
        Group("**", weight_decay=0.5),
        Group("**/dense0", weight_decay=0.6, eps=1e-3),
        Group("**/dense0", weight_decay=0.7),
        Group(kind="bias", weight_decay=0.0),
        Group(["**/dense1", "**/dense0"], learning_rate=0.2),
        Group("**/dense1", kind="bias", learning_rate_scale=2.0),
    ]
    made = recipe(optimizer=polyamp.adamw(0.1, groups=groups))
    found = hyperparameters_by_end(polyamp.init(harness.mlp(layers()), made))
    shown = {end: (m.spec.weight_decay, m.spec.eps, m.learning_rate) for end, m in found.items()}
    assert shown == {
        "dense0/kernel": (0.7, 1e-3, 0.2),
        "dense0/bias": (0.0, 1e-3, 0.2),
        "dense1/kernel": (0.5, 1e-8, 0.2),
        "dense1/bias": (0.0, 1e-8, 0.1 * 2.0),
    }
    assert found["dense1/bias"].scale == 2.0
    assert found["dense1/kernel"].own_rate


@pytest.mark.parametrize("kind", ["bias", "norm", "vector"])
def test_s27_kinds(backend: Backend, harness: Harness, kind: str) -> None:
    """By whatever names a framework has; an embedding, which this model has not, is none of its parameters."""
    made = recipe(optimizer=polyamp.adamw(0.1, weight_decay=0.5, groups=no_decay(kind, "embedding")))
    groups = polyamp.init(harness.normalized_mlp(layers()), made).groups
    assert groups is not None
    spared = [path.split("/")[-2] for path in groups.numbers if groups.of(path).spec.weight_decay == 0.0]
    owners = sorted(owner if owner.startswith("dense") else "norm" for owner in spared)
    expected = {
        "bias": ["dense0", "dense1", "norm"],
        "norm": ["norm"] * 2,
        "vector": ["dense0", "dense1", *["norm"] * 2],
    }
    assert owners == expected[kind]
    assert len(groups.numbers) == 6


def test_s27_a_glob_that_matches_no_parameter_is_refused(backend: Backend, harness: Harness) -> None:
    made = recipe(optimizer=polyamp.adamw(0.1, groups=[Group("**/dense7/bias", weight_decay=0.0)]))
    with pytest.raises(PolyampError, match=r"'\*\*/dense7/bias' matches no trainable parameter. Nearest: .*dense"):
        polyamp.init(harness.mlp(layers()), made)


def test_s27_unused_parameters_of_a_group_stay(backend: Backend, harness: Harness) -> None:
    """And come back with corrections of their own count, like the same ones without groups (S23)."""
    groups = [Group("**/dense1", learning_rate_scale=0.5), *no_decay("bias")]
    made = recipe(optimizer=polyamp.adamw(0.05, weight_decay=0.1, groups=groups))
    oracle = registry.get("reference").testing()
    ends = []
    for owner in (harness, oracle):
        state = polyamp.init(owner.branches(two_branches()), made)
        for number, loss in enumerate((loss_of_both, loss_of_first, loss_of_both)):
            before = second_branch_arrays(state.backend, state)
            state, _ = polyamp.train_step(loss, made)(state, batch(number))
            assert (changed_arrays(before, second_branch_arrays(state.backend, state)) == []) is (loss is loss_of_first)
        ends.append(flat_weights(owner, state))
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=2e-6)


def test_s27_groups_resume_and_a_changed_one_is_said(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    rate = schedules.warmup_cosine(1e-2, 3, 30)

    made = recipe(optimizer=polyamp.adamw(rate, groups=[*GROUPS, Group("**/dense1", weight_decay=0.3)]))
    step = polyamp.train_step(loss_fn, made)

    def advanced(state: Any, steps: range) -> Any:
        for number in steps:
            state, _ = step(state, batch(number))
        return state

    half = advanced(polyamp.init(harness.mlp(layers()), made), range(2))
    polyamp.save(half, tmp_path / "half")
    whole = backend.export_state(advanced(half, range(2, 4)))
    again = polyamp.restore(polyamp.init(harness.mlp(layers(seed=5)), made), tmp_path / "half")
    assert changed_arrays(whole, backend.export_state(advanced(again, range(2, 4)))) == []
    changed = made.replace(optimizer=polyamp.adamw(rate, groups=[*GROUPS, Group("**/dense1", weight_decay=0.4)]))
    other = polyamp.init(harness.mlp(layers(seed=5)), changed)
    with pytest.raises(CheckpointError, match=r"optimizer.groups.3.weight_decay: 0.3 -> 0.4"):
        polyamp.restore(other, tmp_path / "half")
    restored = polyamp.restore(other, tmp_path / "half", on_change="accept")
    assert hyperparameters_by_end(restored)["dense1/kernel"].spec.weight_decay == 0.4
    restored, _ = polyamp.train_step(loss_fn, changed)(restored, batch(2))
    again = polyamp.restore(polyamp.init(harness.mlp(layers(seed=5)), made), tmp_path / "half")
    ends = [harness.weights(state) for state in (advanced(again, range(2, 3)), restored)]
    assert np.array_equal(ends[0][0].kernel, ends[1][0].kernel)
    assert not np.array_equal(ends[0][1].kernel, ends[1][1].kernel), "the code's groups train"


def module_path_in_backend(backend: Backend, harness: Harness, module: str) -> str:
    """A module's path in this framework."""
    groups = polyamp.init(harness.mlp(layers()), recipe(optimizer=polyamp.sgd(0.1))).groups
    assert groups is not None
    return next(path for path in groups.numbers if module in path).rpartition("/")[0]


def test_s05_an_alias_names_a_module_in_overrides_and_groups(backend: Backend, harness: Harness) -> None:
    seen: dict[str, list[str]] = {}
    own = module_path_in_backend(backend, harness, "dense0")[:-1] + "*"
    for first in ("blocks/0", "**/dense0"):
        made = recipe(
            polyamp.Policy("mixed_bfloat16", overrides={first: "float32"}),
            optimizer=polyamp.sgd(0.1, groups=[Group(f"{first}/**", learning_rate=0.0)]),
            aliases={"blocks/*": {backend.name: own, "another": "elsewhere/*"}, "head": {"another": "x"}},
        )
        dtypes: list[str] = seen.setdefault(first, [])
        state = polyamp.init(harness.mlp(layers(), observe=dtypes.append), made)
        before = harness.weights(state)
        state, _ = polyamp.train_step(loss_fn, made)(state, batch())
        after = harness.weights(state)
        assert np.array_equal(before[0].kernel, after[0].kernel)
        assert not np.array_equal(before[1].kernel, after[1].kernel)
    assert seen["blocks/0"] == seen["**/dense0"]
    assert set(seen["blocks/0"]) == {"float32", "bfloat16"}


@pytest.mark.parametrize("bad", ["nothing", "taken"])
def test_s05_an_alias_that_does_not_fit_is_refused(backend: Backend, harness: Harness, bad: str) -> None:
    first, second = (module_path_in_backend(backend, harness, name) for name in ("dense0", "dense1"))
    aliases = {"nothing": {"head": {backend.name: "nonesuch"}}, "taken": {second: {backend.name: first}}}[bad]
    made = recipe(optimizer=polyamp.sgd(0.1, groups=[Group("**", learning_rate=0.2)]), aliases=aliases)
    expected = {"nothing": "matches no path of this model. Nearest: .*dense", "taken": "already a name of"}[bad]
    with pytest.raises(PolyampError, match=expected):
        polyamp.init(harness.mlp(layers()), made)
