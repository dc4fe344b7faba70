"""`train_step(compile=True)` with losses that are no mean over rows (S8): equal to the eager step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import polyamp
from polyamp.errors import UnsupportedError

TRACED: dict[str, Any] = {"backend": "aot_eager"}


def given(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 3, (8,), generator=generator)
    labels[: (5, 7, 8)[step]] = -100
    return {"x": torch.randn(8, 4, generator=generator), "labels": labels}


def ignoring(model: Any, batch: Any) -> torch.Tensor:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["labels"], ignore_index=-100)


def number_of(batch: Any) -> Any:
    return polyamp.losses.count(batch["labels"] != -100)


def own_sum(model: Any, batch: Any) -> torch.Tensor:
    return ignoring(model, batch) * 1.0


def means(model: Any, batch: Any) -> Any:
    outputs = model(batch["x"])
    rows = polyamp.losses.softmax_cross_entropy(outputs, batch["labels"], ignore_index=-100, reduction="sum")
    return polyamp.losses.Mean(rows, number_of(batch)) + 0.1 * outputs.square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "options", "native"),
    [(ignoring, {}, False), (own_sum, {"weight": number_of}, True)],
    ids=["loss-spec", "fn-native"],
)
def test_s08_a_compiled_window_counts_by_the_labels(loss_fn: Any, options: Any, native: bool) -> None:
    """The last window has no label that counts: it is skipped, and Adam's decay does not move anything."""
    found = []
    for how in ({}, {"compile": TRACED}):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2) if native else polyamp.adamw(1e-2)
        recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, clip_norm=0.5, accumulate_steps=2)
        state = polyamp.init(model, recipe)
        step = polyamp.train_step(loss_fn, recipe, **how, **options)
        results = []
        for number in range(3):
            state, result = step(state, given(number))
            results.append([float(result.loss), float(result.weight), float(result.skipped), float(result.step)])
        found.append((torch.tensor(results), model.weight.detach().clone()))
    (eager, weight), (compiled, other) = found
    assert eager[:, 1:].tolist() == [[3.0, 0.0, 1.0], [1.0, 0.0, 2.0], [0.0, 1.0, 2.0]]
    torch.testing.assert_close(compiled, eager, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(other, weight, rtol=2e-6, atol=1e-7)


def selecting(model: Any, batch: Any) -> torch.Tensor:
    """The rows whose labels are not ignored: the compiler does not know how many."""
    counts = batch["labels"] != -100
    return polyamp.losses.softmax_cross_entropy(model(batch["x"])[counts], batch["labels"][counts])


def cut(model: Any, batch: Any) -> torch.Tensor:
    """Nothing, as the compiler knows."""
    return polyamp.losses.mean_squared_error(model(batch["x"])[:0], batch["x"][:0, :3])


@pytest.mark.parametrize("count", [1, 2])
def test_s08_a_compiled_step_counts_what_is_selected(count: int) -> None:
    """As the eager step does; the last two batches select nothing and are skipped."""
    found = []
    for how in ({}, {"compile": TRACED}):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2), accumulate_steps=count)
        state = polyamp.init(model, recipe)
        steps = [polyamp.train_step(loss_fn, recipe, **how) for loss_fn in (selecting, cut)]
        results = []
        for number in range(4):
            state, result = steps[number == 3](state, given(min(number, 2)))
            results.append([float(result.loss), float(result.skipped), float(result.step)])
        assert float(result.weight) == 0.0
        found.append((torch.tensor(results), model.weight.detach().clone()))
    (eager, weight), (compiled, other) = found
    assert eager[:, 1:].tolist() == [[0.0, 1.0], [0.0, 2.0], [1.0, 2.0], [1.0, 2.0]]
    torch.testing.assert_close(compiled, eager, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(other, weight, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("count", [1, 2])
def test_batches_of_many_lengths_make_two_graphs(count: int) -> None:
    """One of the first length, and one that leaves the length open: what is looked at of lengths does not fix them."""

    def plain(model: Any, batch: Any) -> torch.Tensor:
        return polyamp.losses.mean_squared_error(model(batch["x"]), batch["x"][:, :3])

    torch.compiler.reset()
    counters.clear()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1), accumulate_steps=count)
    state = polyamp.init(nn.Linear(4, 3), recipe)
    step = polyamp.train_step(plain, recipe, compile=TRACED)
    for rows in (8, 6, 10, 12, 20, 24):
        state, _ = step(state, {"x": torch.ones(rows, 4)})
    assert counters["stats"]["unique_graphs"] == 2


def test_s08_a_compiled_window_warns_of_a_selection_in_a_sum() -> None:
    def own(model: Any, batch: Any) -> torch.Tensor:
        return selecting(model, batch) * 1.0

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1), accumulate_steps=2)
    state = polyamp.init(nn.Linear(4, 3), recipe)
    with pytest.warns(UserWarning, match="ignored, weighted or selected elements into a sum of its own"):
        polyamp.train_step(own, recipe, compile=TRACED)(state, given(0))


def test_s20_a_compiled_window_refuses_a_sum_of_means() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1), accumulate_steps=2)
    state = polyamp.init(nn.Linear(4, 3), recipe)
    with pytest.raises(UnsupportedError, match="takes no sum of Means over different counts"):
        polyamp.train_step(means, recipe, compile=TRACED)(state, given(0))


def test_weights_of_a_fixed_length_beside_a_length_that_the_compiler_leaves_open() -> None:
    """torch makes a length a symbol once a step of this process was compiled for another batch."""
    fixed = torch.arange(24.0).reshape(8, 3)

    def errors(model: Any, batch: Any, weights: Any = None) -> Any:
        outputs = model(batch["x"])
        return polyamp.losses.mean_squared_error(outputs, outputs.detach() * 0.5, weights=weights)

    def weighted(model: Any, batch: Any) -> Any:
        return errors(model, batch, fixed)

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    step, state = polyamp.train_step(errors, recipe, compile=TRACED), polyamp.init(nn.Linear(4, 3), recipe)
    for rows in (8, 6, 5):
        step(state, {"x": torch.ones(rows, 4)})
    losses = []
    for how in ({}, {"compile": TRACED}):
        torch.manual_seed(0)
        state = polyamp.init(nn.Linear(4, 3), recipe)
        losses.append(float(polyamp.train_step(weighted, recipe, **how)(state, given(0))[1].loss))
    assert losses[1] == pytest.approx(losses[0])
