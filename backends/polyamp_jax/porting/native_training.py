"""Training states of models trained with plain optax. flax's `DynamicScale` or jmp's classes contain the loss scale.

These scales are recognised by their fields, so that neither library is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import ArgumentError, describe_value, join_first
from polyamp.porting.states.optimizer_layout import OptimizerLayout
from polyamp.recipe.scaler import PRESETS
from polyamp_jax.arrays import named_leaves, path_name, to_numpy
from polyamp_jax.models.libraries import adapt
from polyamp_jax.models.running_state import RunningState
from polyamp_jax.porting.jax_only.optax_masks import masked_parts
from polyamp_jax.porting.jax_only.optimizer_holder import OptimizerHolder
from polyamp_jax.porting.optimizer_layout import inspect_optax_state
from polyamp_jax.step.optimizer_metadata import optimizer_metadata

Array = np.ndarray[Any, Any]

_HYPERPARAMETER_PATTERNS: Final = (
    (r"scale_by_adam\.eps$|scale_by_rms\.eps$|scale_by_stddev\.eps$|scale_by_rss\.eps$", "eps"),
    (r"trace\.decay$", "momentum"),
    (r"trace\.nesterov$", "nesterov"),
    (r"scale_by_(rms|stddev)\.decay$", "alpha"),
    (r"add_decayed_weights\.weight_decay$", "weight_decay"),
)
"""Path suffix of a number that optax's functions close over -> polyamp's name of the hyperparameter."""
_UNKNOWN_HYPERPARAMETERS_NOTE: Final = (
    "an optax state does not say its hyperparameters, which are not compared: training(model, (transformation, state)) "
    "does"
)
_MASKED_PATH: Final = re.compile(r"(^|\.)(masked|partition)\.")
"""Path of a number in a part that is masked."""
_UNSUPPORTED: Final = (
    (r"scale_by_adam\.nesterov$", False, "optax.adam with nesterov=True (NAdam)"),
    (r"scale_by_stddev\.bias_correction$|scale_by_rms\.bias_correction$", False, "bias correction in an RMSprop"),
)
_FORMULA_NOTES: Final = (
    (r"eps_in_sqrt$", False, "optax adds RMSprop's epsilon inside the root, polyamp and torch outside of it"),
    (r"scale_by_adam\.eps_root$", 0.0, "optax adds eps_root inside Adam's root, which polyamp's formula does not have"),
)


class JaxTraining:
    """`polyamp.porting.states.optimizer_layout.NativeTraining` for JAX. Immutable, as usual in JAX.

    Attributes:
        model: as `polyamp.init` accepts it.
        optimizer: an optax state, `(transformation, state)`, flax's `TrainState`, or `nnx.Optimizer`.
        loss_scaler: a `DynamicScale`, or one of jmp's scales; None if there is none.
    """

    def __init__(self, model: Any, optimizer: Any, loss_scaler: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self._parts = adapt(model)
        self._holder = OptimizerHolder(optimizer)
        self._fields = _scaler_fields(loss_scaler)

    @classmethod
    def of(cls, model: Any, optimizer: Any, scaler: Any) -> JaxTraining:
        """Create a training state; see `StateConverter.native`."""
        if optimizer is None:
            raise ArgumentError(
                "training(model, optimizer, scaler): over JAX the optimizer is an optax state, or (transformation, "
                "state), which says its hyperparameters too, or flax's TrainState or nnx.Optimizer. Received: "
                "optimizer=None."
            )
        return cls(model, optimizer, scaler)

    @functools.cached_property
    def layout(self) -> OptimizerLayout:
        return read_optimizer_layout(self._holder.state, self._holder.transformation, self._parts.params)

    @property
    def scaler(self) -> Mapping[str, Any]:
        return {} if self._fields is None else {**PRESETS[self._fields.preset], **self._fields.constants}

    def arrays(self) -> dict[str, Array]:
        held = _state_tree(self._parts.params, self._parts.running, self._holder.state)
        arrays = {name: to_numpy(leaf) for name, leaf in named_leaves(held).items()}
        if self._fields is not None:
            arrays |= {f"loss_scale/{name}": np.asarray(value) for name, value in self._fields.state.items()}
        if self._holder.step is not None:
            counters = {count.array for count in self.layout.counts.values()} | set(self.layout.positions)
            applied = max((int(arrays[name]) for name in counters), default=self._holder.step)
            arrays["step"] = np.asarray(applied, np.int32)  # the holder's own counts skipped steps too
        return arrays

    def replaced(self, arrays: Mapping[str, Array]) -> JaxTraining:
        held = _state_tree(self._parts.params, self._parts.running, self._holder.state)
        new = jax.tree_util.tree_map_with_path(lambda keys, leaf: _array_like(leaf, arrays[path_name(keys)]), held)
        model = self._parts.adapter.join(new["model"], self._parts.running._replace(statistics=new["running"]))
        step = int(arrays["step"]) if "step" in arrays else None
        optimizer = self._holder.replaced(new["optimizer"], new["model"], model, step)
        scaler = self.loss_scaler
        if self._fields is not None:
            state = {name: arrays[f"loss_scale/{name}"].item() for name in self._fields.state}
            scaler = self._fields.replace(state)
        return JaxTraining(model, optimizer, scaler)


def read_optimizer_layout(state: Any, transformation: Any, params: Any) -> OptimizerLayout:
    """Return the layout of an optax state: the meaning of each array, and the hyperparameters.

    Args:
        state: the state.
        transformation: the transformation of that state; None if unknown, then hyperparameters are not compared.
        params: the parameters.
    """
    parameters = list(named_leaves(params))
    found = inspect_optax_state(state, parameters)
    distinct: list[dict[str, Any]] = [{"type": found.kind}]
    leaf_sets = dict.fromkeys(parameters, 0)
    notes, refused = [], list(found.refused)
    if transformation is None:
        notes.append(_UNKNOWN_HYPERPARAMETERS_NOTE)
    else:
        numbers = optimizer_metadata(transformation)
        kind = "adamw" if found.kind == "adam" and _has_decoupled_decay(numbers) else found.kind
        distinct, leaf_sets, said = _leaf_settings(kind, transformation, numbers, params)
        refused += [what for ending, plain, what in _UNSUPPORTED if _has_other_value(numbers, ending, plain)]
        notes += [what for ending, plain, what in _FORMULA_NOTES if _has_other_value(numbers, ending, plain)]
        if not any("learning_rate" in settings for settings in distinct):
            notes.append("optax's learning rate is no number, but a schedule or several: it is not compared")
        notes += [
            f"optax clips gradients by a global norm of {value:g}; a recipe does with clip_norm="
            for path, value in numbers.items()
            if path.endswith("clip_by_global_norm.max_norm")
        ]
        notes += said
    notes += dict.fromkeys(found.notes)
    if "square_avg" in found.slots and "momentum" in found.slots and _has_rate_before_momentum(found.order):
        refused.append("optax.rmsprop's momentum, which holds learning rates (chain scale_by_rms, trace and the rate)")
    return OptimizerLayout(
        found.slots, found.counts, distinct, leaf_sets, found.positions, notes=notes, refused=refused
    )


def _leaf_settings(
    kind: str, transformation: Any, numbers: Mapping[str, Any], params: Any
) -> tuple[list[dict[str, Any]], dict[str, int], list[str]]:
    """Return sets of hyperparameters, parameter -> index of its set, and notes.

    A parameter that a masked optimizer leaves out has no set: optax does not train it with this optimizer.

    Args:
        kind: kind of optimizer.
        transformation: the transformation.
        numbers: the numbers in its closures.
        params: the parameters.
    """
    plain = {path: value for path, value in numbers.items() if not _MASKED_PATH.search(path)}
    shared = {"type": kind, **_hyperparameters(plain)}
    parameters = list(named_leaves(params))
    settings: dict[str, dict[str, Any]] = {name: dict(shared) for name in parameters}
    optimized: set[str] | None = None
    frozen: set[str] = set()
    notes = []
    for part in masked_parts(transformation, params):
        inner = optimizer_metadata(part.inner)
        own = _hyperparameters(inner)
        if part.leaves is None:
            notes.append(
                f"an optax mask cannot be read without the training loop, so that {', '.join(own) or 'what it masks'} "
                "is not compared"
            )
            settings = {name: {key: each[key] for key in each if key not in own} for name, each in settings.items()}
            optimized = set(parameters)
            continue
        for name in parameters:
            if name in part.leaves:
                settings[name] |= own
            elif "weight_decay" in own:
                settings[name].setdefault("weight_decay", 0.0)
        if own.keys() - {"weight_decay"}:
            optimized = (optimized or set()) | part.leaves
        if any("set_to_zero" in path for path in inner):
            frozen |= part.leaves
    trained = (set(parameters) if optimized is None else optimized) - frozen
    if left := [name for name in parameters if name not in trained]:
        notes.append(
            f"optax's masks leave {join_first(left, 3)} out of the optimizer, and the target's recipe does not: freeze "
            "them in the target, or give them a group"
        )
        settings = {name: each for name, each in settings.items() if name in trained}
    distinct: list[dict[str, Any]] = []
    for each in settings.values():
        distinct += [each] if each not in distinct else []
    return distinct or [shared], {name: distinct.index(each) for name, each in settings.items()}, notes


def _has_rate_before_momentum(order: Sequence[str]) -> bool:
    """Return whether a stateless transformation or a schedule is between RMSprop and its momentum.

    That is `scale_by_learning_rate`.
    """
    first = next(number for number, kind in enumerate(order) if kind in ("ScaleByRmsState", "ScaleByRStdDevState"))
    last = order.index("TraceState")
    return any(kind in ("EmptyState", "ScaleByScheduleState") for kind in order[first:last])


def _hyperparameters(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that the functions close over, if each occurs once."""
    found: dict[str, Any] = {}
    for ending, word in _HYPERPARAMETER_PATTERNS:
        values = {value for path, value in numbers.items() if re.search(ending, path)}
        if len(values) == 1:
            found[word] = values.pop()
    betas = [
        {v for path, v in numbers.items() if re.search(rf"scale_by_(adam|lion)\.{b}$", path)} for b in ("b1", "b2")
    ]
    if all(len(each) == 1 for each in betas):
        found["betas"] = [each.pop() for each in betas]
    rates = {-value for path, value in numbers.items() if re.search(r"\.scale\.step_size$", path)}
    if len(rates) == 1:
        found["learning_rate"] = rates.pop()
    return found


def _has_decoupled_decay(numbers: Mapping[str, Any]) -> bool:
    """Return whether the decay follows Adam in the chain, as in AdamW, instead of preceding it."""
    paths = list(numbers)
    adam = next((n for n, path in enumerate(paths) if "scale_by_adam." in path), None)
    decay = next((n for n, path in enumerate(paths) if "add_decayed_weights." in path), None)
    return adam is not None and decay is not None and decay > adam


def _has_other_value(numbers: Mapping[str, Any], ending: str, plain: Any) -> bool:
    return any(value != plain for path, value in numbers.items() if re.search(ending, path))


def _state_tree(params: Any, running: RunningState, state: Any) -> dict[str, Any]:
    """Return the tree whose paths are the names of the arrays."""
    return {"model": params, "running": running.statistics, "optimizer": state}


def _array_like(leaf: Any, array: Array) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if not isinstance(leaf, jax.Array):
        return np.asarray(array) if isinstance(leaf, np.ndarray | np.generic) else type(leaf)(array.item())
    made = jnp.array(array, dtype=leaf.dtype, copy=True)
    return jax.device_put(made, leaf.sharding) if leaf.committed else made


class ScalerFields(NamedTuple):
    """A loss scale of another library, in polyamp's terms.

    Attributes:
        preset: the name of its rule in `LossScaler.like`.
        constants: fields of a `LossScaler`.
        state: fields of a `LossScaleState`, as NumPy scalars.
        replace: function from new values of those fields to the library's object with them.
    """

    preset: str
    constants: Mapping[str, Any]
    state: Mapping[str, Any]
    replace: Callable[[Mapping[str, float]], Any]


def _scaler_fields(scaler: Any) -> ScalerFields | None:
    """Return the fields of a loss scale; None if there is none, or if it does not scale.

    Raises:
        ArgumentError: the object is no known loss scale.

    Example:
        >>> from flax.training.dynamic_scale import DynamicScale
        >>> found = _scaler_fields(DynamicScale(growth_interval=10, scale=1024.0, fin_steps=3))
        >>> found.preset, found.constants["growth_interval"], int(found.state["good_steps"])
        ('flax', 10, 3)
    """
    if scaler is None or type(scaler).__name__ == "NoOpLossScale":
        return None
    if all(hasattr(scaler, name) for name in ("fin_steps", "growth_interval", "minimum_scale")):
        return _flax_fields(scaler)
    if all(hasattr(scaler, name) for name in ("loss_scale", "counter", "period", "factor")):
        return _jmp_fields(scaler)
    if dataclasses.is_dataclass(scaler) and hasattr(scaler, "loss_scale"):
        static: Any = scaler
        scale = float(static.loss_scale)
        return ScalerFields(
            "jmp",
            {"kind": "static", "init_scale": scale, "min_scale": scale, "max_scale": scale},
            {"scale": np.float32(scale)},
            lambda new: _replace_jmp_fields(scaler, new),
        )
    raise ArgumentError(
        "training(model, optimizer, scaler): over JAX the scaler is flax.training.dynamic_scale.DynamicScale, or jmp's "
        f"DynamicLossScale, StaticLossScale or NoOpLossScale, or None. Received: {describe_value(scaler)}."
    )


def _flax_fields(scaler: Any) -> ScalerFields:
    least = {} if scaler.minimum_scale is None else {"min_scale": max(float(scaler.minimum_scale), 2.0**-126)}

    def replace(new: Mapping[str, float]) -> Any:
        # flax compares the count with the interval by ==, so a larger count would never grow the scale again
        return scaler.replace(
            scale=jnp.float32(new["scale"]), fin_steps=jnp.int32(min(new["good_steps"], scaler.growth_interval))
        )

    return ScalerFields(
        "flax",
        {
            "growth_factor": float(scaler.growth_factor),
            "backoff_factor": float(scaler.backoff_factor),
            "growth_interval": int(scaler.growth_interval),
            **least,
        },
        {"scale": np.float32(scaler.scale), "good_steps": np.int32(scaler.fin_steps)},
        replace,
    )


def _jmp_fields(scaler: Any) -> ScalerFields:
    def replace(new: Mapping[str, float]) -> Any:
        counter = np.asarray(min(new["good_steps"], int(scaler.period) - 1), np.asarray(scaler.counter).dtype)
        return dataclasses.replace(_replace_jmp_fields(scaler, new), counter=jnp.asarray(counter))

    return ScalerFields(
        "jmp",
        {
            "growth_factor": float(scaler.factor),
            "backoff_factor": 1.0 / float(scaler.factor),
            "growth_interval": int(scaler.period),
            "min_scale": float(scaler.min_loss_scale),
        },
        {"scale": np.float32(scaler.loss_scale), "good_steps": np.int32(scaler.counter)},
        replace,
    )


def _replace_jmp_fields(scaler: Any, new: Mapping[str, float]) -> Any:
    dtype = getattr(scaler.loss_scale, "dtype", np.float32)
    return dataclasses.replace(scaler, loss_scale=jnp.asarray(new["scale"], dtype))
