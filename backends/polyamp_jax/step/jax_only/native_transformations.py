"""Native optax transformations in a recipe: the extra arguments that a step passes, and `optax.lookahead`.

`value=` is the loss of the step and `grad=` its gradients. Some transformations, such as `optax.polyak_sgd` and
`optax.contrib.reduce_on_plateau`, need them. Line searches need `value_fn=`, which evaluates the loss again at other
parameters. This is rejected, because it takes more than one pass under one scale and one finite flag.

`optax.lookahead` takes pairs of fast and slow parameters (`optax.LookaheadParams`). A model contains only the fast
ones, so a transformation stores the slow parameters in its state.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from polyamp.errors import GradientError, UnsupportedError

_LOOKAHEAD_STATE: Final[type] = optax.LookaheadState
_AVAILABLE_ARGUMENTS: Final = ("value", "grad")


class OptaxExtraArguments(NamedTuple):
    """Extra arguments that are available in a step.

    Attributes:
        value: the unscaled loss of the step, float32 scalar; None if unknown.
        grad: its gradients before clipping, like the parameters; None for a parameter that has none (S23).
    """

    value: Any
    grad: Any


NO_EXTRA_ARGUMENTS: Final = OptaxExtraArguments(None, None)


def update_with_extra(run: Any, grads: Any, opt_state: Any, params: Any, extra: OptaxExtraArguments) -> tuple[Any, Any]:
    """Run `run.update(grads, opt_state, params)` with the extra arguments that it accepts.

    Args:
        run: a native transformation.
        grads: float32 gradients like the parameters, zeros for a parameter without one.
        opt_state: the transformation's state.
        params: the parameters, in float32 at least.
        extra: the available extra arguments.

    Raises:
        GradientError: the transformation needs the value of the loss, which is unknown.
    """
    given = {}
    if extra.value is not None:
        given["value"] = jnp.asarray(extra.value, jnp.float32)
    if extra.grad is not None:
        given["grad"] = jax.tree.map(lambda g, own: jnp.zeros_like(g) if own is None else own, grads, extra.grad)
    taken = _accepted_arguments(run)
    try:
        updates, state = run.update(grads, opt_state, params, **{name: given[name] for name in taken if name in given})
    except TypeError as error:
        if extra.value is None and "value" in _missing_arguments(error):
            raise GradientError(
                f"the optimizer ({_failed_function_name(error)}) asks for the value of the loss, which these gradients "
                "do not hold: Gradients.loss is None. Change the gradients that value_and_grad returned with "
                "gradients._replace(values=...), or give the loss: gradients._replace(loss=...)."
            ) from error
        raise
    return updates, state


def check_extra_arguments(run: Any, opt_state: Any, params: Any) -> None:
    """Reject a native transformation that needs unavailable arguments, before the first step (S20).

    The transformation is traced with a step's arguments and not run. Other errors are left for the step to raise.

    Raises:
        UnsupportedError: names the transformation and the arguments that it needs.
    """

    def update(grads: Any, opt_state: Any) -> Any:
        return update_with_extra(run, grads, opt_state, grads, OptaxExtraArguments(np.float32(0.0), grads))

    try:
        jax.eval_shape(update, params, opt_state)
    except TypeError as error:
        wanted = [name for name in _missing_arguments(error) if name not in _AVAILABLE_ARGUMENTS]
        if wanted:
            listed = " and ".join(f"{name}=" for name in wanted)
            raise UnsupportedError(
                f"optimizer: optax's {_failed_function_name(error)} asks for {listed} at every update. A step gives "
                "value= (its loss) and grad=; a function that evaluates the loss again, as line searches and L-BFGS "
                "want it, is more than one pass under one loss scale and one finite flag. Use a transformation "
                "without it (for instance optax.lbfgs(..., linesearch=None), optax.polyak_sgd), or a loop of your "
                "own with polyamp_jax.scaled_value_and_grad."
            ) from error
    except Exception:  # noqa: BLE001  # the step raises any other error
        return


def _accepted_arguments(run: Any) -> list[str]:
    """Return the available arguments that the transformation's `update` accepts."""
    try:
        parameters = inspect.signature(run.update).parameters
    except (TypeError, ValueError):  # not a Python function
        return []
    hands_on = isinstance(run, optax.GradientTransformationExtraArgs) or isinstance(
        getattr(run.update, "__self__", None), optax.MultiSteps
    )
    if hands_on and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return list(_AVAILABLE_ARGUMENTS)
    return [name for name in _AVAILABLE_ARGUMENTS if name in parameters]


def _missing_arguments(error: TypeError) -> list[str]:
    """Return the missing arguments named in Python's `TypeError`."""
    found = re.search(r"missing \d+ required (?:keyword-only|positional) arguments?: (.*)$", str(error))
    return re.findall(r"'(\w+)'", found[1]) if found else []


def _failed_function_name(error: TypeError) -> str:
    """Return the name of the function that needs the arguments."""
    return str(error).partition("(")[0].partition(".<locals>")[0]


class SlowParametersState(NamedTuple):
    """State of `optax.lookahead` in a recipe.

    Attributes:
        slow: the slow parameters, for evaluation.
        state: optax's own.
    """

    slow: Any
    state: Any


def is_lookahead(optimizer: Any) -> bool:
    """Return whether a transformation is the result of `optax.lookahead`. A nested lookahead does not count."""
    update = getattr(optimizer, "update", None)
    made_by = getattr(update, "__qualname__", "").partition(".")[0]
    return made_by == "lookahead" and str(getattr(update, "__module__", "")).partition(".")[0] == "optax"


def slow_parameters_transformation(lookahead: Any) -> Any:
    """Return the transformation of the fast parameters.

    Args:
        lookahead: the result of `optax.lookahead`.
    """

    def init(params: Any) -> SlowParametersState:
        return SlowParametersState(params, lookahead.init(optax.LookaheadParams.init_synced(params)))

    def update(grads: Any, state: SlowParametersState, params: Any) -> tuple[Any, SlowParametersState]:
        pair = optax.LookaheadParams(fast=params, slow=state.slow)
        updates, own = lookahead.update(grads, state.state, pair)
        return updates.fast, SlowParametersState(optax.apply_updates(state.slow, updates.slow), own)

    return optax.GradientTransformation(init, update)


def check_outermost(optimizer: Any, opt_state: Any) -> None:
    """Reject a lookahead inside another transformation, which would receive the parameter pairs too.

    Raises:
        UnsupportedError: explains the supported form.
    """
    if is_lookahead(optimizer):
        return
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, _LOOKAHEAD_STATE))
    if any(isinstance(node, _LOOKAHEAD_STATE) for node in nodes):
        raise UnsupportedError(
            "optax.lookahead inside of another transformation: it is given pairs of fast and slow parameters, which "
            "the transformations around it do not take. Put it outermost: optax.lookahead(optax.chain(...), "
            "sync_period=..., slow_step_size=...)."
        )
