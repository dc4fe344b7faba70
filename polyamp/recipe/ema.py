"""`Ema`: exponential moving averages of a model's parameters, as part of a recipe (S34)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from polyamp.errors import RecipeError, did_you_mean, plain_number_hint
from polyamp.recipe.overrides import check_glob
from polyamp.records import Record

_STATISTICS = ("current", "average")


class Ema(Record):
    """Exponential moving average of every trained parameter, for evaluation (S34).

    Averages are float32 (float64 for float64 parameters), and move once per applied update: not at a skipped step, and
    not per micro-batch. The first move copies the parameters; each later one is
    `average += (1 - decay) * (parameter - average)`. `polyamp.averaged(state)` and `polyamp.averaged_model(state)` give
    the model with them.

    Equal to `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, to Keras's `use_ema=True` with
    `ema_momentum=decay`, and, from the second move on, to `optax.incremental_update(params, average, 1 - decay)`.

    Args:
        decay: share of the old average that a move keeps, at least 0 and below 1.
        warmup: whether early moves keep less: move n keeps `min(decay, (1 + n) / (10 + n))`, the formula of
            `tf.train.ExponentialMovingAverage(num_updates=...)`.
        every: number of applied updates per move.
        statistics: what the averaged model has as running statistics: "current", those of the model, as
            `AveragedModel(use_buffers=False)` has; or "average", averages of the floating ones (`use_buffers=True`).
        exclude: one glob or several over parameter paths, as in `Group`; the averaged model has their current values.

    Raises:
        RecipeError: an impossible value.

    Example:
        >>> import numpy as np, polyamp
        >>> from polyamp.reference import MLP
        >>> recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.5), ema=polyamp.Ema(decay=0.9))
        >>> weights = {"dense0/kernel": np.ones((1, 1), "f4"), "dense0/bias": np.zeros(1, "f4")}
        >>> state = polyamp.init(MLP(weights), recipe)
        >>> step = polyamp.train_step(lambda model, x: polyamp.losses.mean_squared_error(model(x), x * 0.0), recipe)
        >>> for _ in range(3):
        ...     state, _ = step(state, np.ones((2, 1), "f4"))
        >>> with polyamp.averaged(state) as model:
        ...     averaged = model.parameters["dense0/kernel"]
        >>> float(averaged[0, 0]) != float(state.model.parameters["dense0/kernel"][0, 0])
        True
    """

    word: ClassVar[str] = "ema"

    decay: float = 0.999
    warmup: bool = False
    every: int = 1
    statistics: Literal["current", "average"] = "current"
    exclude: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        decay, every = self.decay, self.every
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0.0 <= decay < 1.0:
            raise RecipeError(
                f"ema: decay must be a number of at least 0 and below 1, such as 0.999. Received: decay={decay!r}."
                + plain_number_hint(decay)
            )
        if not isinstance(self.warmup, bool):
            raise RecipeError(f"ema: warmup must be True or False. Received: warmup={self.warmup!r}.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise RecipeError(
                f"ema: every must be an integer of at least 1. Received: every={every!r}." + plain_number_hint(every)
            )
        if self.statistics not in _STATISTICS:
            close = did_you_mean(self.statistics, _STATISTICS) if isinstance(self.statistics, str) else ""
            raise RecipeError(
                f"ema: statistics must be 'current' or 'average'. Received: statistics={self.statistics!r}.{close}"
            )
        globs = (self.exclude,) if isinstance(self.exclude, str) else self.exclude
        if not isinstance(globs, list | tuple):
            raise RecipeError(f"ema: exclude must be a glob or several. Received: exclude={self.exclude!r}.")
        for glob in globs:
            check_glob(glob, argument="ema: each glob of exclude", error=RecipeError)
        self._set_field("exclude", tuple(globs))

    @property
    def globs(self) -> tuple[str, ...]:
        """`exclude`, always a tuple."""
        return tuple(self.exclude)
