"""`parameters`: trainable parameters of a model by path, for penalties that work in every framework (S29)."""

from __future__ import annotations

from typing import Any

from polyamp.contract.registry import backend_of


def parameters(model: Any) -> dict[str, Any]:
    """Return the trainable parameters of a model by path, in the model's order: the master weights.

    In `loss_fn` they are differentiable and have the policy's `param` dtype in both modes: under a mixed policy a
    penalty over them is float32.

    Args:
        model: the model that `loss_fn` receives, or the framework's own model, such as `state.model`.

    Returns:
        Path -> the framework's array, of the parameter's shape. The paths are those of checkpoints and reports:
        `/`-separated, with the framework's own names.

    Raises:
        BackendError: no backend recognises the model.
        ModelError: a Keras model that is not built, or a part of a JAX model.

    Example:
        >>> from polyamp import losses
        >>> from polyamp.reference import MLP
        >>> model = MLP.random([2, 1], seed=0)
        >>> {path: array.shape for path, array in parameters(model).items()}
        {'dense0/kernel': (2, 1), 'dense0/bias': (1,)}
        >>> def loss_fn(model, batch):
        ...     kernels = [array for path, array in parameters(model).items() if not path.endswith("bias")]
        ...     return losses.mean_squared_error(model(batch["x"]), batch["y"]) + 1e-4 * losses.sum_of_squares(kernels)
    """
    return backend_of(model).parameters(model)
