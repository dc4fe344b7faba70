"""Keras models with a `compute_loss` and a `train_step` of their own, compiled by a recipe.

    KERAS_BACKEND=jax python examples/keras/own_train_step.py        # or tensorflow, or torch

`polyamp_keras.compile` keeps both. A `train_step` of one's own calls `optimizer.scale_loss` and `optimizer.apply` (on
JAX `stateless_apply`), as Keras's does; a step that overflows is skipped as a whole.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import polyamp
import polyamp_keras

RECIPE = polyamp.Recipe(
    policy="mixed_bfloat16", scaler=polyamp.LossScaler(init_scale=64.0), optimizer=polyamp.adamw(1e-2)
)


class PenaltyModel(keras.Model):
    """Model whose loss adds the mean square of its output."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *rest: Any, **options: Any) -> Any:
        """Return the compiled loss and the penalty, float32 scalar."""
        penalty = keras.ops.mean(keras.ops.square(keras.ops.cast(y_pred, "float32")))
        return super().compute_loss(x, y, y_pred, *rest, **options) + 0.01 * penalty


class TensorFlowStep(PenaltyModel):
    """The step of Keras's guide for TensorFlow."""

    def train_step(self, data: Any) -> Any:
        """Train on one batch."""
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            output = self(x, training=True)
            loss = self.compute_loss(x, y, output)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"batch_loss": loss}


class TorchStep(PenaltyModel):
    """The step of Keras's guide for torch."""

    def train_step(self, data: Any) -> Any:
        """Train on one batch."""
        x, y = data[:2]
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.scale_loss(loss).backward()
        variables = list(self.trainable_weights)
        self.optimizer.apply([variable.value.grad for variable in variables], variables)
        return {"batch_loss": loss.detach()}


class JaxStep(PenaltyModel):
    """The step of Keras's guide for JAX."""

    def train_step(self, state: Any, data: Any) -> Any:
        """Train on one batch."""
        import jax

        weights, others, variables, metrics = state
        x, y = data[:2]
        differentiate = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, aux), gradients = differentiate(
            weights, others, metrics, x, y, None, training=True, optimizer_variables=variables
        )
        loss, _, others, metrics = aux
        weights, variables = self.optimizer.stateless_apply(variables, gradients, weights)
        return {"batch_loss": loss}, (weights, others, variables, metrics)


STEPS: dict[str, type[PenaltyModel]] = {"tensorflow": TensorFlowStep, "torch": TorchStep, "jax": JaxStep}


def network(kind: type[PenaltyModel]) -> Any:
    """Dense layers with BatchNorm, (batch, 4) -> (batch, 3)."""
    inputs = keras.Input((4,))
    x = keras.layers.Dense(16, "gelu", kernel_initializer=keras.initializers.GlorotUniform(0), name="hidden")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    return kind(inputs, keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(1))(x))


def batches() -> tuple[Any, Any]:
    """Four batches of 16 rows, of which the second overflows."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = np.sin(x[:, :3])
    x[16] = np.inf
    return x, y


def main() -> list[tuple[Any, list[float]]]:
    """Train with each; return the models and their losses of the epochs, the first of which holds the overflow."""
    found = []
    x, y = batches()
    for kind in (PenaltyModel, STEPS[keras.config.backend()]):
        model = network(kind)
        polyamp_keras.compile(model, RECIPE, loss="mse")
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        history = model.fit(x[32:], y[32:], batch_size=16, epochs=8, shuffle=False, verbose=0).history
        losses = history.get("batch_loss", history.get("loss"))
        found.append((model, losses))
        print(f"{kind.__name__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, skipped {model.optimizer.skipped_steps}")
    return found


if __name__ == "__main__":
    main()
