"""`OwnLoop`, a side trained by the user's own code, and the `Trainer` protocol that hides how a side trains."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from polyamp.contract import registry
from polyamp.errors import ArgumentError, describe_value
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.states.training_side import Training, is_training_side, make_training_side
from polyamp.recipe.optimizers import sgd
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.results import LossFunction
from polyamp.train.step import init, train_step

SCALE: Final = "loss_scale/scale"
"""Name of the loss scale among a training's arrays."""


@dataclasses.dataclass(frozen=True)
class OwnLoop:
    """User-written training loop, passed in place of a side's recipe.

    Args:
        begin: `begin(model) -> polyamp.porting.training(model, optimizer, scaler)`: set up the loop before its first
            step. It is called several times, each time with a copy of the model.
        step: `step(training, batch) -> (training, loss)`: run one step. In torch and Keras it returns the training
            that it received, changed; in JAX a new one. `batch` is of NumPy arrays.
        policy: precision in which the loop computes, as a `Policy` or its spelling.

    Compared are the loop's losses, parameters, moments, scale and number of updates. Its forward and backward pass are
    recorded with `loss_fn` under `policy`.

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
        """Recipe with which the forward and backward pass are recorded."""
        return Recipe(policy=Policy.of(self.policy), optimizer=sgd(0.0))


class Trainer(Protocol):
    """Protocol of an object that trains a copy of a side's model."""

    @property
    def state(self) -> Any:
        """Current polyamp state of the model, for recording a pass."""

    @property
    def training(self) -> Any:
        """Current training state, as `polyamp.port` takes it."""

    def step(self, batch: Any) -> Mapping[str, float]:
        """Run one step and return its metrics: "loss", "grad_norm", "finite", "scale", "applied"."""


class RecipeTrainer:
    """Trainer that uses `polyamp.train_step`.

    Args:
        model: a copy of the side's model.
        recipe: the recipe of the phase.
        loss_fn: the loss.
        options: `{"init": {...}, "step": {...}}`.

    Attributes:
        seconds: wall time of the last step, including reading its loss.
    """

    seconds = 0.0

    def __init__(
        self, model: Any, recipe: Recipe, loss_fn: LossFunction, options: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.state = init(model, recipe, **options["init"])
        self._step = train_step(loss_fn, recipe, **options["step"])

    @property
    def training(self) -> Any:
        return self.state

    def step(self, batch: Any) -> Mapping[str, float]:
        to_numpy = self.state.backend.to_numpy
        began = time.perf_counter()
        self.state, result = self._step(self.state, batch)
        loss = float(to_numpy(result.loss))
        self.seconds = time.perf_counter() - began
        return {
            "loss": loss,
            "grad_norm": float(to_numpy(result.grad_norm)),
            "scale": float(to_numpy(result.scale)),
            "finite": 1.0 - float(to_numpy(result.skipped)),
            "applied": float(to_numpy(result.step)),
        }


class LoopTrainer:
    """Trainer that runs an `OwnLoop`.

    Args:
        model: a copy of the side's model.
        loop: the loop.
        recipe: recipe with which its passes are recorded in the phase, under the loop's own loss scale.
        options: `{"init": {...}, "step": {...}}`.
        inventory: layers of the model.
    """

    def __init__(
        self,
        model: Any,
        loop: OwnLoop,
        recipe: Recipe,
        options: Mapping[str, Mapping[str, Any]],
        inventory: Inventory,
    ) -> None:
        self._loop, self._recipe, self._options, self._inventory = loop, recipe, options, inventory
        self.training = loop.begin(model)
        if not isinstance(self.training, Training):
            raise ArgumentError(
                "OwnLoop(begin, step): begin(model) must return polyamp.porting.training(model, optimizer, scaler). "
                f"Received: {describe_value(self.training)}."
            )
        self._pass_state: tuple[Any, LossScaler | None, Any] = (None, None, None)

    @property
    def state(self) -> Any:
        model, scaler = self.training.model, self._scaler()
        if self._pass_state[0] is not model or self._pass_state[1] != scaler:
            recipe = self._recipe.replace(scaler=scaler)
            self._pass_state = (model, scaler, init(model, recipe, **self._options["init"]))
        return self._pass_state[2]

    def _scaler(self) -> LossScaler:
        """Return a scaler with the loop's current scale: another scale overflows elsewhere."""
        scaler = self._recipe.loss_scaler
        if not scaler.scales:
            return scaler
        scale = make_training_side(self.training, target=False, inventory=self._inventory).arrays.get(SCALE)
        value = scaler.init_scale if scale is None else float(scale)
        if not 0.0 < value < math.inf:
            return scaler
        return LossScaler(
            init_scale=value, min_scale=min(value, scaler.min_scale), max_scale=max(value, scaler.max_scale)
        )

    def step(self, batch: Any) -> Mapping[str, float]:
        made = self._loop.step(self.training, batch)
        if not (isinstance(made, tuple) and len(made) == 2 and is_training_side(made[0])):
            raise ArgumentError(
                "OwnLoop(begin, step): step(training, batch) must return (training, loss). Received: "
                f"{describe_value(made)}."
            )
        self.training, loss = made
        return {"loss": float(registry.backend_for(self.training.model).to_numpy(loss))}
