"""`inspect_setup`: measures a training of JAX's that does not use polyamp (`InspectsSetups`).

JAX arrays are immutable, so that a pass and an update change nothing. Operations are read from the program.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from polyamp.errors import ArgumentError, describe_value
from polyamp.linter.setup_figures import SetupFigures, TrainingSetup, WeightFigures
from polyamp.rules.step_checks import check_loss, split_loss_and_aux
from polyamp_jax.arrays import dtype_name
from polyamp_jax.observe.jax_only.program_figures import ProgramFigures, read_program

_HALVINGS: Final = 40
"""How often a scale whose gradients overflow is halved, from 2^24 to 2^-16."""


def inspect_setup(setup: TrainingSetup) -> SetupFigures:
    """Measure a set-up (`InspectsSetups.inspect_setup`)."""
    parameters = _parameters(setup.model)
    if setup.step is not None:
        raise ArgumentError("lint: step is for torch, whose gradients are clipped in place. Leave step= out.")
    if setup.optimizer is None and setup.opt_state is not None:
        raise ArgumentError("lint: opt_state belongs to an optax transformation. Pass optimizer= too.")
    if setup.optimizer is not None and not (hasattr(setup.optimizer, "init") and hasattr(setup.optimizer, "update")):
        hint = " Pass its .tx, and .opt_state as opt_state=." if hasattr(setup.optimizer, "tx") else ""
        raise ArgumentError(
            f"lint: optimizer must be an optax transformation. Received: {describe_value(setup.optimizer)}.{hint}"
        )
    opt_state = setup.opt_state
    if setup.optimizer is not None and opt_state is None:
        opt_state = setup.optimizer.init(parameters.tree(parameters.values))
    figures = SetupFigures(
        backend="jax",
        weights=[
            WeightFigures(name=name, dtype=dtype_name(value), moments=_moments(opt_state, path, value))
            for name, path, value in zip(parameters.names, parameters.paths, parameters.values, strict=True)
        ],
        scales=_scale(setup.scaler) is not None,
        scaler_name="polyamp_jax.scaled_value_and_grad, jmp.DynamicLossScale",
    )
    if not setup.runs:
        return figures
    run = _Pass(setup, parameters)
    program = run.program()
    dtypes = {each.name: each.dtype for each in figures.weights}
    figures = msgspec.structs.replace(
        figures,
        operations=program.operations,
        dtypes=program.dtypes,
        head=None if program.head is None else {program.head: dtypes[program.head]},
    )
    gradients = None if setup.optimizer is None else run.gradients(_scale(setup.scaler) or 1.0)
    if gradients is None:
        return figures
    return msgspec.structs.replace(
        figures, weights=_measure_update(figures.weights, setup.optimizer, opt_state, parameters, gradients)
    )


class _Parameters(NamedTuple):
    """The floating arrays of a model.

    Attributes: names; their paths in the pytree, as texts; values; the model's leaves and where the arrays stand among
    them; its structure.
    """

    names: list[str]
    paths: list[tuple[str, ...]]
    values: list[Any]
    leaves: list[Any]
    places: list[int]
    structure: Any

    def model(self, values: Any) -> Any:
        """Return the model with other arrays."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self.structure, leaves)

    def tree(self, values: Any) -> Any:
        """Return the model with other arrays and None in the place of every other leaf, as optimizers take it."""
        leaves: list[Any] = [None] * len(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self.structure, leaves)


def _parameters(model: Any) -> _Parameters:
    found, structure = jax.tree_util.tree_flatten_with_path(model)
    places = [place for place, (_, leaf) in enumerate(found) if _is_floating(leaf)]
    if not places:
        raise ArgumentError(
            "lint: model must be a pytree of parameters, such as variables['params'] or an equinox module; of an nnx "
            f"model nnx.state(model, nnx.Param). Received: {describe_value(model)}."
        )
    paths = [tuple(map(_key_text, found[place][0])) for place in places]
    leaves = [leaf for _, leaf in found]
    values = [jnp.asarray(leaves[place]) for place in places]
    names = ["/".join(path).removesuffix("/value") for path in paths]  # flax's variables have a value
    return _Parameters(names, paths, values, leaves, places, structure)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _key_text(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _scale(scaler: Any) -> float | None:
    """Return the scale of a scaler; None for one that is off: polyamp's, jmp's, flax's, or a number."""
    if scaler is None or getattr(scaler, "scales", True) is False:
        return None
    for name in ("loss_scale", "scale", "init_scale"):
        value = scaler if isinstance(scaler, int | float) else getattr(scaler, name, None)
        if value is not None and not callable(value):
            return None if float(value) == 1.0 else float(value)
    raise ArgumentError(
        "lint: scaler must be a number, or an object with a loss_scale, such as jmp.DynamicLossScale. Received: "
        f"{describe_value(scaler)}."
    )


def _moments(opt_state: Any, path: tuple[str, ...], value: Any) -> dict[str, str]:
    """Return the dtypes of the arrays of the state that stand at the path of a parameter."""
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        texts = tuple(map(_key_text, keys))
        holder = texts[: len(texts) - len(path)]
        if holder + path == texts and _is_floating(leaf) and leaf.shape == value.shape:
            found[holder[-1] if holder else "state"] = dtype_name(leaf)
    return found


class _Pass:
    """The loss as a function of the parameters' arrays."""

    def __init__(self, setup: TrainingSetup, parameters: _Parameters) -> None:
        self._setup, self._parameters = setup, parameters

    def program(self) -> ProgramFigures:
        """Return what the program of the loss, and of its gradient, holds."""
        values = self._parameters.values
        forward = jax.make_jaxpr(self._loss)(values)
        both = jax.make_jaxpr(jax.grad(self._loss))(values)
        return read_program(forward.jaxpr, both.jaxpr, self._parameters.names)

    def gradients(self, scale: float) -> list[Any] | None:
        """Return unscaled gradients; None if no scale makes them finite."""
        scaled = jax.jit(jax.grad(lambda values, factor: self._loss(values) * factor))
        for _ in range(_HALVINGS):
            found = scaled(self._parameters.values, jnp.float32(scale))
            if all(bool(jnp.isfinite(each).all()) for each in found):
                return [(each.astype(jnp.float32) / scale).astype(each.dtype) for each in found]
            if scale == 1.0:
                return None
            scale = max(scale / 2, 1.0)
        return None

    def _loss(self, values: Any) -> Any:
        loss, _ = split_loss_and_aux(self._setup.loss_fn(self._parameters.model(values), self._setup.batch))
        loss = jnp.asarray(loss)
        check_loss(tuple(loss.shape), dtype_name(loss))
        return loss.reshape(()).astype(jnp.float32)


def _measure_update(
    weights: list[WeightFigures], optimizer: Any, opt_state: Any, parameters: _Parameters, gradients: list[Any]
) -> list[WeightFigures]:
    """Return the figures with what one update moves.

    A parameter whose update is zero everywhere, as in the first step of a warmup, counts as not measured.
    """
    try:
        update, after = optimizer.update(parameters.tree(gradients), opt_state, parameters.tree(parameters.values))
    except Exception as error:
        raise ArgumentError(
            f"lint: an update of the optimizer raises {type(error).__name__}: {error}. Pass the opt_state of these "
            "parameters, or leave optimizer= out."
        ) from error
    moves = jax.tree.leaves(update)
    measured = []
    for figures, path, old, move, gradient in zip(
        weights, parameters.paths, parameters.values, moves, gradients, strict=True
    ):
        new = (old + move).astype(old.dtype)  # as optax.apply_updates
        acts = gradient != 0
        if bool((move != 0).any()):
            counts = {"with_gradient": int(acts.sum()), "unmoved": int((acts & (new == old)).sum())}
            figures = msgspec.structs.replace(figures, moments=_moments(after, path, old), **counts)
        measured.append(figures)
    return measured
