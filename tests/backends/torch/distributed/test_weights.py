"""Losses that are no mean over rows, on several ranks: the result is that of one batch of all ranks' rows (S9)."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

import polyamp
from tests import ranks
from tests.backends.torch.distributed.training import ENGINES, collectives, digest, distance, mlp, whole

COUNTS = [(5, 1), (0, 4), (3, 0), (6, 6)]
"""Labels that count in the batch of 6 rows of each rank, step by step."""


def given(step: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's batch; ignored rows hold what nobody could train on."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    labels = torch.randint(0, 2, (6,), generator=generator)
    labels[COUNTS[step][rank] :] = -100
    return {"x": torch.randn(6, 6, generator=generator), "labels": labels}


def ignoring(model: Any, batch: Any) -> torch.Tensor:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["labels"], ignore_index=-100)


def selecting(model: Any, batch: Any) -> torch.Tensor:
    """The rows whose labels are not ignored, and no others."""
    counts = batch["labels"] != -100
    return polyamp.losses.softmax_cross_entropy(model(batch["x"])[counts], batch["labels"][counts])


def number_of(batch: Any) -> Any:
    return polyamp.losses.count(batch["labels"] != -100)


def own(model: Any, batch: Any) -> torch.Tensor:
    """A loss of the user's own, for `weight=`."""
    rows = torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
    return rows / number_of(batch).clamp(min=1.0)


def sum_of_means(model: Any, batch: Any) -> Any:
    outputs = model(batch["x"])
    rows = polyamp.losses.softmax_cross_entropy(outputs, batch["labels"], ignore_index=-100, reduction="sum")
    return polyamp.losses.Mean(rows, number_of(batch)) + 0.1 * outputs.square().mean()


def weighed(rank: int, world: int) -> dict[str, tuple[float, str]]:
    """Four steps of every engine against one batch of all rows on one device."""
    found = {}
    for engine in ("ddp", "fsdp2"):
        for name, loss_fn, options in (
            ("ignoring", ignoring, {}),
            ("selecting", selecting, {}),
            ("own", own, {"weight": number_of}),
            ("sum", sum_of_means, {}),
        ):
            for count in (1, 2):
                settings: dict[str, Any] = {"optimizer": polyamp.adamw(1e-2), "clip_norm": 0.1}
                recipe = polyamp.Recipe(policy="float32", accumulate_steps=count, **settings)
                state = polyamp.init(ENGINES[engine](mlp(), world), recipe)
                step = polyamp.train_step(loss_fn, recipe, **options)
                alone = polyamp.init(mlp(), polyamp.Recipe(policy="float32", **settings))
                step_alone = polyamp.train_step(sum_of_means if name == "sum" else ignoring, alone.recipe)
                apart = 0.0
                for number in range(len(COUNTS)):
                    state, result = step(state, given(number, rank))
                    both = [given(number, other) for other in range(world)]
                    alone, expected = step_alone(alone, {k: torch.cat([b[k] for b in both]) for k in both[0]})
                    apart = max(apart, distance([result.loss, result.grad_norm], [expected.loss, expected.grad_norm]))
                parameters = [whole(p).detach() for p in state.parameters.values()]
                apart = max(apart, distance(parameters, [p.detach() for p in alone.parameters.values()]))
                found[f"{engine} {name} {count}"] = (apart, digest(state))
    return found


def test_s09_ranks_count_by_the_labels_that_count() -> None:
    """A rank without any among them; both ranks end with the same bits."""
    found = ranks.run(weighed, 2, 2)
    assert found[0] == found[1]
    assert {name: apart for name, (apart, _) in found[0].items() if not apart < 2e-6} == {}


def test_s08_an_engine_with_one_process_counts_its_window_by_the_labels() -> None:
    """It reduces nothing, so the step divides by itself; a step without any label is among them."""
    (found,) = ranks.run(weighed, 1, 1)
    assert {name: apart for name, (apart, _) in found.items() if not apart < 2e-6} == {}


def nothing(rank: int, world: int) -> list[tuple[float, float, bool, bool]]:
    """A step in which no rank has a label that counts; and what a step sends beside the gradients."""
    found = []
    for engine, loss_fn, count in itertools.product(("ddp", "fsdp2"), (ignoring, selecting), (1, 2)):
        optimizer = polyamp.adamw(1e-2, weight_decay=0.5)
        recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, accumulate_steps=count)
        state = polyamp.init(ENGINES[engine](mlp(), world), recipe)
        step = polyamp.train_step(loss_fn, recipe)
        state, _ = step(state, given(0, rank))
        before = [whole(p).detach().clone() for p in state.parameters.values()]
        empty = {**given(1, rank), "labels": torch.full((6,), -100)}
        state, result = step(state, empty)
        same = all(torch.equal(whole(p), old) for p, old in zip(state.parameters.values(), before, strict=True))
        found.append((float(result.loss), float(result.weight), bool(result.skipped), same))
    return found


def test_s09_a_step_without_any_label_on_any_rank_is_skipped_and_says_so() -> None:
    assert ranks.run(nothing, 2, 2) == [[(0.0, 0.0, True, True)] * 8] * 2


def halves(rank: int, world: int) -> list[float]:
    """The gradients of `value_and_grad` are those of one batch of all ranks' rows."""
    found = []
    for engine in ("ddp", "fsdp2"):
        recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
        state = polyamp.init(ENGINES[engine](mlp(), world), recipe)
        alone = polyamp.init(mlp(), recipe)
        for number in range(len(COUNTS)):
            _, gradients = polyamp.value_and_grad(ignoring)(state, given(number, rank))
            both = [given(number, other) for other in range(world)]
            _, expected = polyamp.value_and_grad(ignoring)(alone, {k: torch.cat([b[k] for b in both]) for k in both[0]})
            values = [whole(gradient).detach() for gradient in gradients.values.values()]
            found.append(distance(values, list(expected.values.values())))
            state, _ = polyamp.apply_gradients(state, gradients)
            alone, _ = polyamp.apply_gradients(alone, expected)
    return found


def test_s09_the_halves_give_the_gradients_of_one_batch() -> None:
    assert max(max(apart) for apart in ranks.run(halves, 2, 2)) < 2e-6


def sent(rank: int, world: int) -> dict[str, list[int]]:
    """How many collectives the second and the third step send, with weights and without."""
    found = {}
    for engine in ("ddp", "fsdp2"):
        for name, loss_fn in (("labels", ignoring), ("rows", lambda model, batch: model(batch["x"]).square().mean())):
            recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
            state = polyamp.init(ENGINES[engine](mlp(), world), recipe)
            step = polyamp.train_step(loss_fn, recipe)
            state, _ = step(state, given(0, rank))
            found[f"{engine} {name}"] = [
                collectives(functools.partial(step, state, given(number, rank))).total() for number in (1, 2)
            ]
    return found


def test_s09_weights_travel_in_the_one_reduction_that_there_is() -> None:
    for found in ranks.run(sent, 2, 2):
        assert found["ddp labels"] == found["ddp rows"]
        assert found["fsdp2 labels"] == found["fsdp2 rows"]
