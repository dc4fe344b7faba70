"""`OwnLoop`: a side that is trained by the user's own code instead of `polyamp.train_step`; and `Trainer`, what both
kinds of side look like to a run. Called by `running`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from polyamp.contract import registry
from polyamp.errors import ArgumentError, described
from polyamp.porting.states.sides import Training, is_side
from polyamp.recipe.optimizers import sgd
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction
from polyamp.train.step import init, train_step


@dataclasses.dataclass(frozen=True)
class OwnLoop:
    """A training loop of the user's own, to be compared with a recipe or with another loop: it stands where a side's
    recipe stands.

    Args:
        begin: `begin(model) -> polyamp.porting.training(model, optimizer, scaler)`: what the loop makes before its
            first step. It is given a copy of the model, several times.
        step: `step(training, batch) -> (training, loss)`: one step as the program makes it. In torch and Keras the
            training that it is given comes back, changed; in JAX a new one. `batch` holds NumPy arrays.
        policy: the precision that the loop computes in, as a `Policy` or its spelling.

    The loop's losses, parameters, moments, scale and number of updates are compared; its forward and backward pass are
    looked at through `loss_fn`, under `policy`.

    Example::

        def begin(model):
            return polyamp.porting.training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

        def step(training, batch):
            training.optimizer.zero_grad()
            loss = loss_fn(training.model, {name: torch.from_numpy(array) for name, array in batch.items()})
            loss.backward()
            training.optimizer.step()
            return training, loss

        polyamp.compare(torch_model, flax_model, batch, loss_fn, (polyamp.parity.OwnLoop(begin, step), recipe))
    """

    begin: Callable[[Any], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    policy: Policy | str = "float32"

    @property
    def recipe(self) -> Recipe:
        """What its forward and backward pass are looked at with."""
        return Recipe(policy=Policy.of(self.policy), optimizer=sgd(0.0))


class Trainer(Protocol):
    """What trains a copy of a side's model."""

    @property
    def state(self) -> Any:
        """A polyamp state of the model as it is now, for a look at a pass."""

    @property
    def training(self) -> Any:
        """The training state as it is now, as `polyamp.port` takes it."""

    def step(self, batch: Any) -> Mapping[str, float]:
        """One step, and the numbers that it reports: "loss", "grad_norm", "finite", "scale", "applied"."""


class RecipeTrainer:
    """`polyamp.train_step`.

    Args:
        model: a copy of the side's model.
        recipe: the recipe of the phase.
        loss_fn: the loss.
        options: `{"init": {...}, "step": {...}}`.
    """

    def __init__(
        self, model: Any, recipe: Recipe, loss_fn: LossFunction, options: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.state = init(model, recipe, **options["init"])
        self._step = train_step(loss_fn, recipe, **options["step"])

    @property
    def training(self) -> Any:
        return self.state

    def step(self, batch: Any) -> Mapping[str, float]:
        self.state, result = self._step(self.state, batch)
        backend = self.state.backend
        numbers = {
            name: float(backend.to_numpy(getattr(result, name))) for name in ("loss", "grad_norm", "scale", "skipped")
        }
        skipped = numbers.pop("skipped")
        return {**numbers, "finite": 1.0 - skipped, "applied": float(backend.to_numpy(result.step))}


class LoopTrainer:
    """An `OwnLoop`.

    Args:
        model: a copy of the side's model.
        loop: the loop.
        recipe: what its passes are looked at with in the phase.
        options: `{"init": {...}, "step": {...}}`.
    """

    def __init__(self, model: Any, loop: OwnLoop, recipe: Recipe, options: Mapping[str, Mapping[str, Any]]) -> None:
        self._loop, self._recipe, self._options = loop, recipe, options
        self.training = loop.begin(model)
        if not isinstance(self.training, Training):
            raise ArgumentError(
                "OwnLoop(begin, step): begin(model) must return polyamp.porting.training(model, optimizer, scaler). "
                f"Received: {described(self.training)}."
            )
        self._looked: tuple[Any, Any] = (None, None)

    @property
    def state(self) -> Any:
        model = self.training.model
        if self._looked[0] is not model:
            self._looked = (model, init(model, self._recipe, **self._options["init"]))
        return self._looked[1]

    def step(self, batch: Any) -> Mapping[str, float]:
        made = self._loop.step(self.training, batch)
        if not (isinstance(made, tuple) and len(made) == 2 and is_side(made[0])):
            raise ArgumentError(
                "OwnLoop(begin, step): step(training, batch) must return (training, loss). Received: "
                f"{described(made)}."
            )
        self.training, loss = made
        return {"loss": float(registry.backend_for(self.training.model).to_numpy(loss))}
