"""Models that are trained with optax by itself, their loss scale in flax's `DynamicScale` or jmp's classes: for
`polyamp.porting.training`. Called by `states`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import ArgumentError, described
from polyamp.porting.states.layout import OptimizerLayout
from polyamp.recipe.scaler import PRESETS
from polyamp_jax.arrays import named_leaves, to_numpy
from polyamp_jax.models.adapt import adapt
from polyamp_jax.models.parts import Running
from polyamp_jax.porting.optimizer_states import found_in
from polyamp_jax.porting.scalers import scaler_fields
from polyamp_jax.step.resuming import described as described_optimizer

Array = np.ndarray[Any, Any]

_SETTINGS: Final = (
    (r"scale_by_adam\.eps$|scale_by_rms\.eps$|scale_by_stddev\.eps$|scale_by_rss\.eps$", "eps"),
    (r"trace\.decay$", "momentum"),
    (r"trace\.nesterov$", "nesterov"),
    (r"scale_by_(rms|stddev)\.decay$", "alpha"),
    (r"add_decayed_weights\.weight_decay$", "weight_decay"),
)
"""How the path of a number that optax's functions close over ends -> polyamp's word for it."""
_UNKNOWN: Final = (
    "an optax state does not say its hyperparameters, which are not compared: training(model, (transformation, state)) "
    "does"
)
_REFUSED: Final = (
    (r"scale_by_adam\.nesterov$", False, "optax.adam with nesterov=True (NAdam)"),
    (r"scale_by_stddev\.bias_correction$|scale_by_rms\.bias_correction$", False, "bias correction in an RMSprop"),
)
_NOTED: Final = (
    (r"eps_in_sqrt$", False, "optax adds RMSprop's epsilon inside the root, polyamp and torch outside of it"),
    (r"scale_by_adam\.eps_root$", 0.0, "optax adds eps_root inside Adam's root, which polyamp's formula does not have"),
)


class JaxTraining:
    """`polyamp.porting.states.layout.NativeTraining` over JAX: a value, as everything in JAX.

    Attributes:
        model: as `polyamp.init` takes it.
        optimizer: an optax state, or whatever holds one as `opt_state` (flax's TrainState), or `(transformation,
            state)`.
        loss_scaler: a `DynamicScale`, or one of jmp's scales; None where there is none.
    """

    def __init__(self, model: Any, optimizer: Any, loss_scaler: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self._parts = adapt(model)
        self._fields = scaler_fields(loss_scaler)

    @classmethod
    def of(cls, model: Any, optimizer: Any, scaler: Any) -> JaxTraining:
        """See `StateConverter.native`."""
        if optimizer is None:
            raise ArgumentError(
                "training(model, optimizer, scaler): over JAX the optimizer is an optax state, or (transformation, "
                "state), which says its hyperparameters too, or flax's TrainState. Received: optimizer=None."
            )
        return cls(model, optimizer, scaler)

    @property
    def layout(self) -> OptimizerLayout:
        transformation, state = _halves(self.optimizer)
        return optax_layout(state, transformation, list(named_leaves(self._parts.params)))

    @property
    def scaler(self) -> Mapping[str, Any]:
        return {} if self._fields is None else {**PRESETS[self._fields.preset], **self._fields.constants}

    def arrays(self) -> dict[str, Array]:
        held = _held(self._parts.params, self._parts.running, _halves(self.optimizer)[1])
        arrays = {name: to_numpy(leaf) for name, leaf in named_leaves(held).items()}
        if self._fields is not None:
            arrays |= {f"loss_scale/{name}": np.asarray(value) for name, value in self._fields.state.items()}
        return arrays

    def replaced(self, arrays: Mapping[str, Array]) -> JaxTraining:
        held = _held(self._parts.params, self._parts.running, _halves(self.optimizer)[1])
        names = list(named_leaves(held))
        leaves, structure = jax.tree.flatten(held)
        made = [_like(leaf, arrays[name]) for name, leaf in zip(names, leaves, strict=True)]
        new = jax.tree.unflatten(structure, made)
        model = self._parts.adapter.join(new["model"], self._parts.running._replace(statistics=new["running"]))
        optimizer = _with_state(self.optimizer, new["optimizer"], new["model"])
        scaler = self.loss_scaler
        if self._fields is not None:
            state = {name: arrays[f"loss_scale/{name}"].item() for name in self._fields.state}
            scaler = self._fields.replaced(state)
        return JaxTraining(model, optimizer, scaler)


def optax_layout(state: Any, transformation: Any, parameters: Sequence[str]) -> OptimizerLayout:
    """Which arrays of an optax state are what.

    Args:
        state: the state.
        transformation: what it is the state of; None where nobody knows, and its hyperparameters are not compared.
        parameters: paths of the parameters, in the order of their leaves.
    """
    found = found_in(state, parameters)
    settings: dict[str, Any] = {"type": found.kind}
    notes, refused = [], list(found.refused)
    if transformation is None:
        notes.append(_UNKNOWN)
    else:
        said = described_optimizer(transformation)
        settings |= _settings(said)
        refused += [what for ending, plain, what in _REFUSED if _other(said, ending, plain)]
        notes += [what for ending, plain, what in _NOTED if _other(said, ending, plain)]
        if "learning_rate" not in settings:
            notes.append("optax's learning rate is no number, but a schedule or several: it is not compared")
        notes += [
            f"optax clips gradients by a global norm of {value:g}; a recipe does with clip_norm="
            for path, value in said.items()
            if path.endswith("clip_by_global_norm.max_norm")
        ]
        if settings["type"] == "adam" and _decoupled(said):
            settings["type"] = "adamw"
    if found.kind == "adagrad":
        notes.append("optax adds Adagrad's epsilon inside the root, polyamp and torch outside of it")
    if "square_avg" in found.slots and "momentum" in found.slots and _after_the_rate(found.order):
        refused.append("optax.rmsprop's momentum, which holds learning rates (chain scale_by_rms, trace and the rate)")
    return OptimizerLayout(
        found.slots,
        found.counts,
        [settings],
        dict.fromkeys(parameters, 0),
        found.positions,
        notes=notes,
        refused=refused,
    )


def _after_the_rate(order: Sequence[str]) -> bool:
    """Whether what has no state, or a schedule, stands between RMSprop and its momentum: `scale_by_learning_rate`."""
    first = next(number for number, kind in enumerate(order) if kind in ("ScaleByRmsState", "ScaleByRStdDevState"))
    last = order.index("TraceState")
    return any(kind in ("EmptyState", "ScaleByScheduleState") for kind in order[first:last])


def _settings(said: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that the functions close over, where there is one of each."""
    found: dict[str, Any] = {}
    for ending, word in _SETTINGS:
        values = {value for path, value in said.items() if re.search(ending, path)}
        if len(values) == 1:
            found[word] = values.pop()
    betas = [{v for path, v in said.items() if re.search(rf"scale_by_(adam|lion)\.{b}$", path)} for b in ("b1", "b2")]
    if all(len(each) == 1 for each in betas):
        found["betas"] = [each.pop() for each in betas]
    rates = {-value for path, value in said.items() if re.search(r"\.scale\.step_size$", path)}
    if len(rates) == 1:
        found["learning_rate"] = rates.pop()
    return found


def _decoupled(said: Mapping[str, Any]) -> bool:
    """Whether the decay comes behind Adam in the chain, as in AdamW, and not before it."""
    paths = list(said)
    adam = next((n for n, path in enumerate(paths) if "scale_by_adam." in path), None)
    decay = next((n for n, path in enumerate(paths) if "add_decayed_weights." in path), None)
    return adam is not None and decay is not None and decay > adam


def _other(said: Mapping[str, Any], ending: str, plain: Any) -> bool:
    return any(value != plain for path, value in said.items() if re.search(ending, path))


def _halves(optimizer: Any) -> tuple[Any, Any]:
    """(transformation or None, state) of what was given."""
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and callable(getattr(optimizer[0], "update", None)):
        return optimizer[0], optimizer[1]
    if hasattr(optimizer, "opt_state"):
        return getattr(optimizer, "tx", None), optimizer.opt_state
    return None, optimizer


def _with_state(optimizer: Any, state: Any, params: Any) -> Any:
    """What was given, around another state."""
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and callable(getattr(optimizer[0], "update", None)):
        return optimizer[0], state
    if hasattr(optimizer, "opt_state"):
        if not callable(getattr(optimizer, "replace", None)) or not hasattr(optimizer, "params"):
            raise ArgumentError(
                "training(model, optimizer, scaler): of what holds an optax state only flax's TrainState can be made "
                f"anew. Received: {described(optimizer)}. Give (transformation, state)."
            )
        return optimizer.replace(opt_state=state, params=params)
    return state


def _held(params: Any, running: Running, state: Any) -> dict[str, Any]:
    """The tree whose paths are the names of the arrays."""
    return {"model": params, "running": running.statistics, "optimizer": state}


def _like(leaf: Any, array: Array) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if not isinstance(leaf, jax.Array):
        return np.asarray(array) if isinstance(leaf, np.ndarray | np.generic) else type(leaf)(array.item())
    made = jnp.array(array, dtype=leaf.dtype, copy=True)
    return jax.device_put(made, leaf.sharding) if leaf.committed else made
