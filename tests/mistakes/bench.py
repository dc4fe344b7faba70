"""What the rows are typed with: a small model, its state, a batch and a step, in one framework or in none.

Called by the tests of `tests/mistakes` and `tests/core/mistakes`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import polyamp
from polyamp import Policy, Recipe
from tests.mistakes.table import Row


def loss_fn(model: Any, batch: Any) -> Any:
    """The loss that is no mistake."""
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


def apply_fn(params: Any, x: Any) -> Any:
    """The model in JAX: a function."""
    return x @ params["w"] + params["b"]


@dataclasses.dataclass
class Pair:
    """A batch as a dataclass."""

    x: Any
    y: Any


class Output:
    """What a model of a library of transformers returns: the loss is one of its attributes."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss


def names(folder: Path) -> dict[str, Any]:
    """What rows are typed with where no framework is needed: files of several kinds lie in `folder`."""
    return {
        "polyamp": polyamp,
        "Policy": Policy,
        "Recipe": Recipe,
        "LossScaler": polyamp.LossScaler,
        "schedules": polyamp.schedules,
        "np": np,
        "folder": folder,
    }


class Bench:
    """A framework's bench: the state is one for all rows, because no mistake may touch it."""

    def __init__(self, framework: str, folder: Path) -> None:
        self.framework = framework
        self.recipe = Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-2))
        self.state = polyamp.init(self.model(), self.recipe)
        x = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)
        self.batch = {"x": x, "y": x[:, :2] * 2}
        step = polyamp.train_step(loss_fn, self.recipe)
        self.names = {
            **names(folder),
            "state": self.state,
            "recipe": self.recipe,
            "model": self.model(),
            "batch": self.batch,
            "x": x,
            "loss_fn": loss_fn,
            "step": step,
            "done": step(self.fresh(), self.batch),
            "fresh": self.fresh,
            "train": lambda loss: polyamp.train_step(loss, self.recipe)(self.state, self.batch),
            "on": lambda batch: step(self.state, batch),
            "half": polyamp.value_and_grad(loss_fn),
            "grads": polyamp.value_and_grad(loss_fn)(self.state, self.batch)[1],
            "mse": polyamp.losses.mean_squared_error,
            "Pair": Pair,
            "Output": Output,
            "apply_fn": apply_fn,
            "path": folder / "state.safetensors",
            **self._own(),
        }
        self.before = self.snapshot()

    def model(self) -> Any:
        """A dense layer from 3 to 2 features, the same numbers each time."""
        w, b = np.linspace(-0.5, 0.5, 6, dtype="float32").reshape(3, 2), np.zeros(2, "float32")
        if self.framework == "torch":
            import torch

            made = torch.nn.Linear(3, 2)
            with torch.no_grad():
                made.weight.copy_(torch.from_numpy(w.T.copy()))
                made.bias.zero_()
            return made
        if self.framework == "tensorflow":
            import keras

            dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
            dense.set_weights([w, b])
            return dense
        import jax.numpy as jnp

        return apply_fn, {"w": jnp.asarray(w), "b": jnp.asarray(b)}

    def fresh(self) -> Any:
        """A state that may be spoiled."""
        return polyamp.init(self.model(), self.recipe)

    def snapshot(self) -> dict[str, Any]:
        """Every array of the state but torch's random stream, which is the process's: making a model draws of it."""
        found: dict[str, Any] = self.state.backend.export_state(self.state)
        return {name: array for name, array in found.items() if not name.startswith("rng/cpu")}

    def unharmed(self) -> bool:
        """Whether every array of the state is bit for bit as it was."""
        now = self.snapshot()
        return list(now) == list(self.before) and all(
            now[name].dtype == old.dtype and now[name].tobytes() == old.tobytes() for name, old in self.before.items()
        )

    def _own(self) -> dict[str, Any]:
        """The framework's own modules, by the names that everybody imports them under."""
        if self.framework == "torch":
            import torch

            import polyamp_torch

            return {"torch": torch, "nn": torch.nn, "array": torch.as_tensor, "polyamp_torch": polyamp_torch}
        if self.framework == "tensorflow":
            import keras
            import tensorflow as tf

            return {"tf": tf, "keras": keras, "array": tf.convert_to_tensor}
        import flax.linen
        import jax
        import jax.numpy as jnp
        import optax
        from flax import nnx

        return {"jax": jax, "jnp": jnp, "optax": optax, "linen": flax.linen, "nnx": nnx, "array": jnp.asarray}


def typed(row: Row, namespace: dict[str, Any]) -> BaseException | None:
    """Run a row; what it raised."""
    try:
        exec(compile(row.typed, "<typed>", "exec"), {**namespace})
    except Exception as error:  # noqa: BLE001  # whatever a mistake raises is what is looked at
        return error
    return None


def message(error: BaseException) -> str:
    """The message and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
