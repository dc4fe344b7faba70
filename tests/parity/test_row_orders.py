"""`compare` finds the order of dense layers' rows next to a flatten from the first batch, and guesses none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyamp import Recipe, compare, sgd
from polyamp.parity import OwnLoop, Report, run
from polyamp.porting import training
from tests import xla
from tests.porting.flatten_models import IMAGE, LAYERS, nnx_model, torch_model

xla.quick()  # before the first program is compiled

RATE = 0.01
KINDS = [kind for kind in LAYERS if kind != "added"]  # its sum of flattened channels and a state fits one layout alone


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "x": rng.standard_normal((4, *IMAGE)).astype("f4"),
        "s": rng.standard_normal((4, 5)).astype("f4"),
    }


def squares(model: Any, given: Any) -> Any:
    found = model(given["x"], given["s"])
    return sum((each**2).mean() for each in (found if isinstance(found, tuple) else (found,)))


def both(kind: str, recipe: Any = None) -> Report:
    return compare(torch_model(kind, 1), nnx_model(kind, 2), batch(), squares, recipe, steps=2)


def notes(report: Report) -> list[str]:
    return [note for note in report.comparisons[0].notes if "order of" in note]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_flatten_or_not_agrees(kind: str) -> None:
    report = both(kind)
    assert report.agrees, str(report)
    assert notes(report) == []


def test_the_other_way_round_agrees_too() -> None:
    for kind in ("film", "heads"):
        report = compare(nnx_model(kind, 1), torch_model(kind, 2), nnx_batch(), squares)
        assert report.agrees, str(report)
        assert notes(report) == []


def nnx_batch() -> dict[str, Any]:
    made = batch()
    return {**made, "x": np.ascontiguousarray(np.moveaxis(made["x"], 1, -1))}


def begin(model: Any) -> Any:
    import torch

    return training(model, torch.optim.SGD(model.parameters(), lr=RATE))


def step(made: Any, given: Any) -> Any:
    import torch

    made.optimizer.zero_grad()
    loss = squares(made.model, {name: torch.from_numpy(array) for name, array in given.items()})
    loss.backward()
    made.optimizer.step()
    return made, loss.detach()


@pytest.mark.parametrize("kind", ["film", "fused"])
def test_a_loop_of_the_users_agrees(kind: str) -> None:
    recipes = OwnLoop(begin, step), Recipe(policy="float32", optimizer=sgd(RATE))
    report = both(kind, recipe=recipes)
    assert report.agrees, str(report)
    assert any(row.what == "parameter" and row.module == "fc" for row in report.comparisons[0].rows)


def test_a_batch_of_zeros_shows_none_and_rows_says_it() -> None:
    given = {**batch(), "s": np.zeros((4, 5), "f4")}
    torch_side, nnx_side = torch_model("film", 1), nnx_model("film", 2)
    torch_side.embed.bias.data.zero_()
    report = compare(torch_side, nnx_side, given, squares)
    (said,) = notes(report)
    assert said == (
        "the first batch does not show the order of film's rows (the batch gives it nothing but zeros); they were "
        'taken in the order of flattened channels. rows={"film": None} says that it takes no flattened channels, '
        '"channels" that it does'
    )
    report = compare(torch_side, nnx_side, given, squares, rows={"film": None})
    assert notes(report) == []
    assert report.agrees


def test_a_fault_before_the_layer_stays_where_it_is() -> None:
    """The layer's inputs are no longer the same numbers; the nearer order is the right one."""
    model = nnx_model("heads", 2)
    call = type(model).__call__
    type(model).__call__ = lambda self, x, s: call(self, 1.5 * x, s)
    report = compare(torch_model("heads", 1), model, batch(), squares)
    assert report.first is not None
    assert report.first.module == "conv"
    assert notes(report) == []


def test_a_transposition_that_no_flatten_has_is_a_fault() -> None:
    """(6, 2) is no flatten of 4 channels: sines and cosines in turn are another formula than one after the other."""
    from flax import nnx

    class Turned(nnx.Module):
        def __init__(self, linear: Any) -> None:
            self.linear = linear

        def __call__(self, values: Any) -> Any:
            return self.linear(values.reshape(-1, 6, 2).swapaxes(1, 2).reshape(-1, 12))

    model = nnx_model("film", 2)
    model.film = Turned(model.film)
    report = compare(torch_model("film", 1), model, batch(), squares, names={"^film$": "film/linear"})
    assert report.first is not None
    assert report.first.module == "film"
    assert len(notes(report)) == 2


def film_in_torch() -> Any:
    return torch_model("film", 1)


def film_in_nnx() -> Any:
    return nnx_model("film", 2)


def test_processes_of_their_own_agree(tmp_path: Path) -> None:
    report = run({"torch": film_in_torch, "jax": film_in_nnx}, data=batch(), loss_fn=squares, out=tmp_path)
    assert report.failures == []
    assert report.agrees, str(report)
    assert notes(report) == []
