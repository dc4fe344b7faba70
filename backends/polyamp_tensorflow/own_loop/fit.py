"""`compile`: a recipe for `model.fit`; and `LossScaleLogger`, which shows the scale while it runs.

`fit`, `evaluate` and `predict` stay Keras's. Around the model's own `train_step` a skipped update takes back what the
forward pass did to running statistics, and the host looks for a stuck scale once every `patience` batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

import keras
import tensorflow as tf

from polyamp.errors import LossError, LossScaleError, ModelError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.rules import refusals, stuck
from polyamp.rules.plan import NARROW, Plan
from polyamp_tensorflow.arrays import dtype_name, raw, to_numpy
from polyamp_tensorflow.compat import build_by, build_symbolically
from polyamp_tensorflow.models.layers import is_built, own_class
from polyamp_tensorflow.models.saved_settings import forget, keep, settings_of
from polyamp_tensorflow.models.variables import streams_of, variables_of
from polyamp_tensorflow.own_loop.loss_scale_optimizer import LossScaleOptimizer
from polyamp_tensorflow.own_loop.loss_weights import count_losses, note_counts
from polyamp_tensorflow.own_loop.own_compile import check_own, compile_model
from polyamp_tensorflow.precision.autocast import BY_COMPILE, AppliedPolicy, matmul_precision, planned
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.optimizer_checks import check_recipe_optimizer
from polyamp_tensorflow.step.optimizers import groups_of, make_optimizer
from polyamp_tensorflow.step.xla import needs_xla

_FUNCTIONS: Final = ("train_function", "test_function", "predict_function")


def compile(  # noqa: A001  # Keras's word for it
    model: Any,
    recipe: Recipe,
    *,
    loss: Any = None,
    metrics: Any = None,
    loss_weights: Any = None,
    weighted_metrics: Any = None,
    run_eagerly: bool = False,
    steps_per_execution: int = 1,
    jit_compile: bool | str | None = None,
    **more: Any,
) -> None:
    """`model.compile` by a recipe: then `fit`, `evaluate` and `predict` follow its policy, scaler, optimizer and clip.

    The policy is put on the model for good, and variables stay float32. Each batch that `fit` draws is a micro-batch,
    as with Keras's own accumulation: `accumulate_steps` of them make one update, and each counts by its rows, or by
    what its loss divides by: the mask of its output, or sample weights with `reduction="mean_with_sample_weight"` (S8).
    A window that an epoch's end leaves open goes on in the next epoch.

    Args:
        model: a built `keras.Model`; under a strategy, made in its scope.
        recipe: what `polyamp.train_step` would take.
        loss, metrics, loss_weights, weighted_metrics, run_eagerly, steps_per_execution: as in `model.compile`. Losses
            are computed in float32.
        jit_compile: True, False or "auto" as in Keras. None is "auto", but float16 on one CPU is compiled with XLA,
            which a warning says once per process.
        **more: what a `compile` of the model's own takes beside Keras's arguments, such as the `student_loss_fn` of
            keras.io's Distiller. Of Keras's it gets those that it takes.

    Raises:
        ModelError: not a `keras.Model`, not built, or without float32 parameters.
        LossError: a loss in 16 bits.
        PolicyError, RecipeError, LossScaleError, UnsupportedError: as from `polyamp.init`; XLA on several replicas; an
            argument that the model's `compile` does not take, or lacks.

    Example:
        >>> import keras, polyamp
        >>> import polyamp_tensorflow
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-3), clip_norm=1.0)
        >>> polyamp_tensorflow.compile(model, recipe, loss="mse", metrics=["mae"])
        >>> history = model.fit(keras.ops.ones((8, 4)), keras.ops.zeros((8, 2)), verbose=0)
        >>> int(model.optimizer.iterations), sorted(history.history)
        (1, ['loss', 'mae'])
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"compile takes a keras.Model. Received: {type(model).__module__}.{type(model).__qualname__}. For other "
            "models keep the loop: polyamp.train_step, or polyamp_tensorflow.LossScaleOptimizer."
        )
    if not is_built(model):
        raise ModelError(
            f"compile needs a built model, to put the policy on its layers. Received: {model.name!r}, which is not "
            "built. Call it once on a batch, or give its first layer an Input."
        )
    given = {"loss": loss, "metrics": metrics, "loss_weights": loss_weights, "weighted_metrics": weighted_metrics}
    check_own(model, {name: value for name, value in given.items() if value is not None}, more)
    _check_losses([loss, *more.values()])
    plan = planned(model, recipe.policy)
    check_recipe_optimizer(recipe.optimizer, recipe.clip_norm)
    parameters = variables_of(model).parameters
    refusals.check_parameters([(name, dtype_name(variable)) for name, variable in parameters.items()], recipe)
    with model.distribute_strategy.scope():
        optimizer = LossScaleOptimizer(
            make_optimizer(recipe, parameters, groups_of(model, recipe, parameters)),
            recipe.loss_scaler,
            clip_norm=recipe.clip_norm,
            accumulate_steps=recipe.accumulate_steps,
        )
        optimizer.build(model.trainable_variables)
        jit = _jit_compile(model, plan, jit_compile, run_eagerly)
        _put_policy(model, plan)
        settings = {
            "optimizer": optimizer,
            **given,
            "run_eagerly": run_eagerly,
            "steps_per_execution": steps_per_execution,
            "jit_compile": jit,
            "auto_scale_loss": False,
        }
        compile_model(model, settings, more)
        guard(model, recipe.policy)


def _put_policy(model: Any, plan: Plan) -> None:
    """The policy for good, in place of the one that an earlier `compile` put there."""
    before = vars(model).get(BY_COMPILE)
    AppliedPolicy(model, plan, by_compile=True)  # first, since it may be refused
    if before is not None:
        before.restore()


def guard(model: Any, policy: Policy | str | None = None) -> None:
    """Watch over `model.fit` with a `LossScaleOptimizer`: running statistics and a stuck scale.

    `compile` does this by itself. Call it for a model that `keras.models.load_model` returned, or that was given its
    `LossScaleOptimizer` in `model.compile`. Keras's own `LossScaleOptimizer`, such as a file of somebody else's holds,
    is replaced by `LossScaleOptimizer.from_keras` of it, and the model compiled anew with what it was compiled with.

    Args:
        model: a compiled, built model.
        policy: or its spelling; what `fit`, `evaluate` and `predict` follow with `float32_matmul`.

    Raises:
        LossScaleError: the model's optimizer is no `LossScaleOptimizer`.
        ModelError: a model that is not built.
    """
    _watch(model, None if policy is None else Policy.of(policy).float32_matmul)


def _watch(model: Any, precision: str | None) -> None:
    with model.distribute_strategy.scope():
        _take_over(model)
        _scaling_optimizer(model).prepare_statistics(model)
    cls = own_class(model)
    several_workers = isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy)

    def train_step(data: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if isinstance(model.optimizer, LossScaleOptimizer):  # the user may have compiled the model anew
                stack.enter_context(model.optimizer.keep_statistics(model))
                stack.enter_context(_counted(model.optimizer, data))
            logs = cls.train_step(model, data)
        return _as_vectors(logs) if several_workers else logs

    model.train_step = train_step
    count_losses(model)
    if several_workers:
        model.test_step = lambda data: _as_vectors(cls.test_step(model, data))
        build_by(model, _build_on_first_batch)
    for name in _FUNCTIONS:
        setattr(model, f"make_{name}", _maker(model, name, precision))
        setattr(model, name, None)
    for setting in settings_of(model):
        if isinstance(setting, SavedGuard):
            forget(model, setting)
    keep(model, SavedGuard(model, precision))


@keras.saving.register_keras_serializable(package="polyamp_tensorflow")
class SavedGuard:
    """That `guard` watches over a model, in the model's `.keras` file, with the seeds of its random numbers (S12)."""

    needs_compile: ClassVar[bool] = True

    def __init__(self, model: Any, precision: str | None, seeds: dict[str, Any] | None = None) -> None:
        self._model = model
        self._precision = precision
        self._seeds = seeds

    def get_config(self) -> dict[str, Any]:
        """Plain values."""
        seeds = self._seeds
        if self._model is not None:
            seeds = {name: to_numpy(variable).tolist() for name, variable in streams_of(self._model).items()}
        return {"float32_matmul": self._precision, "seeds": seeds}

    def off(self) -> contextlib.AbstractContextManager[None]:
        """A block that changes nothing: the guard is in no layer's configuration."""
        return contextlib.nullcontext()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SavedGuard:
        """What `get_config` described, for a model that `put_on` is given."""
        return cls(None, config["float32_matmul"], config["seeds"])

    def put_on(self, model: Any) -> None:
        """Watch over a model that Keras has compiled, unless its class compiles in a way of its own."""
        if isinstance(getattr(model, "optimizer", None), LossScaleOptimizer):
            _watch(model, self._precision)
            seeds = self._seeds or {}
            for name, variable in streams_of(model).items():
                if name in seeds:
                    raw(variable).assign(seeds[name])


@contextlib.contextmanager
def _counted(optimizer: LossScaleOptimizer, data: Any) -> Iterator[None]:
    """The block in which a micro-batch counts by its rows, those of all replicas together, or by what its loss divides
    by."""
    arrays = [leaf for leaf in keras.tree.flatten(data) if tf.is_tensor(leaf) and leaf.shape.rank]
    if optimizer.accumulate_steps == 1 or not arrays:
        yield
        return
    (rows,) = replicas.total([tf.cast(tf.shape(arrays[0])[0], tf.float32)])
    with optimizer.micro_batch(rows), note_counts(optimizer.count_micro_batch):
        yield


def _build_on_first_batch(model: Any, iterator: Any, data_batch: Any) -> None:
    """In the place of Keras's own way, which in Keras 3.15 cannot read a batch of several workers: `strategy.reduce`
    takes no tuple there. What is built depends on shapes and dtypes alone, so this worker's part of the batch serves.
    """
    strategy = model.distribute_strategy
    if iterator is not None:
        *_, batches = next(iter(iterator))
        data_batch = keras.tree.map_structure(lambda part: strategy.experimental_local_results(part)[0], next(batches))
    with strategy.scope():
        build_symbolically(model, data_batch)


def _as_vectors(logs: Any) -> Any:
    """Numbers as vectors of one: Keras 3.15 reduces the logs of several workers along axis 0, which a scalar lacks."""
    return keras.tree.map_structure(lambda value: value[None] if value.shape.rank == 0 else value, logs)


def _maker(model: Any, name: str, precision: str | None) -> Callable[..., Any]:
    """Keras's `make_train_function` and its like, with the host's part of the guard around what it makes."""
    own = getattr(own_class(model), f"make_{name}")

    def make(force: bool = False) -> Any:
        if getattr(model, name) is None or force:
            own(model, force)
            setattr(model, name, _watched(model, getattr(model, name), name == "train_function", precision))
        return getattr(model, name)

    return make


def _watched(model: Any, function: Callable[..., Any], trains: bool, precision: str | None) -> Callable[..., Any]:
    watch = stuck.Watch()

    def run(*args: Any) -> Any:
        with matmul_precision(precision):
            result = function(*args)
        optimizer = model.optimizer if trains else None
        if not isinstance(optimizer, LossScaleOptimizer):
            return result
        if watch.due(optimizer.scaler, model.steps_per_execution, optimizer.accumulate_steps):
            optimizer.raise_if_stuck()
        return result

    return run


def _take_over(model: Any) -> None:
    """Put polyamp's wrapper in the place of Keras's own."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not isinstance(optimizer, LossScaleOptimizer):
        settings = keras.saving.deserialize_keras_object(model.get_compile_config())
        model.compile(**{**settings, "optimizer": LossScaleOptimizer.from_keras(optimizer)})


def _scaling_optimizer(model: Any) -> LossScaleOptimizer:
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, LossScaleOptimizer):
        raise LossScaleError(
            "the model must be compiled with a polyamp_tensorflow.LossScaleOptimizer, by polyamp_tensorflow.compile or "
            f"by model.compile. Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}."
        )
    return optimizer


def _check_losses(loss: Any) -> None:
    """Refuse losses that would be computed in 16 bits (S6)."""
    if keras.config.floatx() in NARROW:
        raise UnsupportedError(
            "losses are computed in keras.config.floatx(), which must be float32 (S6). Received: "
            f"{keras.config.floatx()}. Call keras.config.set_floatx('float32') and set the compute dtype by a policy."
        )
    for part in keras.tree.flatten(loss):
        if getattr(part, "dtype", None) in NARROW:
            raise LossError(
                f"loss must be computed in float32. Received: {type(part).__qualname__}(dtype={part.dtype!r}). Drop "
                "its dtype."
            )


def _jit_compile(model: Any, plan: Plan, asked: bool | str | None, run_eagerly: bool) -> bool | str:
    count = model.distribute_strategy.num_replicas_in_sync
    if asked is True and count > 1:
        raise UnsupportedError(
            f"jit_compile=True compiles the step of one replica. Received: a model on a strategy with {count} "
            "replicas. Drop it."
        )
    if asked is not None:
        return asked
    if run_eagerly or count > 1:
        return "auto"
    return True if needs_xla([plan], model.trainable_variables, stacklevel=3) else "auto"


class LossScaleLogger(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Adds `loss_scale_optimizer` and `skipped_steps` to the logs: progress bar, `history`, TensorBoard and CSV files.

    Callbacks see the logs in turn, so list it before `TensorBoard` and `CSVLogger`. Reading the two numbers waits for
    the device after each batch, as the progress bar does.

    Raises (when `fit` starts):
        LossScaleError: the model's optimizer is not a `polyamp_tensorflow.LossScaleOptimizer`.

    Example:
        >>> import keras, polyamp
        >>> import polyamp_tensorflow
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> recipe = polyamp.Recipe(scaler=polyamp.LossScaler(init_scale=64.0), optimizer=polyamp.sgd(0.1))
        >>> polyamp_tensorflow.compile(model, recipe, loss="mse")
        >>> x, y = keras.ops.ones((8, 4)), keras.ops.full((8, 2), float("nan"))
        >>> history = model.fit(x, y, verbose=0, callbacks=[polyamp_tensorflow.LossScaleLogger()])
        >>> history.history["loss_scale"], history.history["skipped_steps"]
        ([32.0], [1])
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a model without a loss scale."""
        _scaling_optimizer(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add both numbers to the batch's logs."""
        self._add(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add both numbers to the epoch's logs."""
        self._add(logs)

    def _add(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            optimizer = _scaling_optimizer(self.model)
            logs["loss_scale"] = float(optimizer.scale_state.scale)
            logs["skipped_steps"] = optimizer.skipped_steps
