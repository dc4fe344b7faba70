"""What optax transformations ask for beside the gradients (`GradientTransformationExtraArgs`), and what is refused.

`value=` is the loss of the step and `grad=` its gradients; some, such as `optax.polyak_sgd` and
`optax.contrib.reduce_on_plateau`, need them. Line searches need `value_fn=`, which evaluates the loss again at other
parameters: that is more than one pass under one scale and one finite flag. Called by `optimizers` and `state`.
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

_GIVEN: Final = ("value", "grad")


class Asked(NamedTuple):
    """What can be given.

    Attributes:
        value: the unscaled loss of the step, float32 scalar; None where it is not known.
        grad: its gradients before clipping, like the parameters; None for a parameter that has none (S23).
    """

    value: Any
    grad: Any


NOTHING: Final = Asked(None, None)


def given_extra(run: Any, grads: Any, opt_state: Any, params: Any, asked: Asked) -> tuple[Any, Any]:
    """`run.update(grads, opt_state, params)` with what it asks for.

    Args:
        run: a native transformation.
        grads: float32 gradients like the parameters, zeros where there is none.
        opt_state: its state.
        params: the parameters, in float32 at least.
        asked: what can be given.

    Raises:
        GradientError: it asks for the value of the loss, which is not known.
    """
    given = {}
    if asked.value is not None:
        given["value"] = jnp.asarray(asked.value, jnp.float32)
    if asked.grad is not None:
        given["grad"] = jax.tree.map(lambda g, own: jnp.zeros_like(g) if own is None else own, grads, asked.grad)
    taken = _takes(run)
    try:
        updates, state = run.update(grads, opt_state, params, **{name: given[name] for name in taken if name in given})
    except TypeError as error:
        if asked.value is None and "value" in _missing(error):
            raise GradientError(
                f"the optimizer ({_name(error)}) asks for the value of the loss, which these gradients do not hold: "
                "Gradients.loss is None. Change the gradients that value_and_grad returned with "
                "gradients._replace(values=...), or give the loss: gradients._replace(loss=...)."
            ) from error
        raise
    return updates, state


def check_extra(run: Any, opt_state: Any, params: Any) -> None:
    """Refuse a native transformation that asks for more than there is, before the first step (S20).

    It is traced with what a step gives it, and nothing is run; what else goes wrong there is the step's to say.

    Raises:
        UnsupportedError: names the transformation and what it asks for.
    """

    def update(grads: Any, opt_state: Any) -> Any:
        return given_extra(run, grads, opt_state, grads, Asked(np.float32(0.0), grads))

    try:
        jax.eval_shape(update, params, opt_state)
    except TypeError as error:
        wanted = [name for name in _missing(error) if name not in _GIVEN]
        if wanted:
            listed = " and ".join(f"{name}=" for name in wanted)
            raise UnsupportedError(
                f"optimizer: optax's {_name(error)} asks for {listed} at every update. A step gives value= (its loss) "
                "and grad=; a function that evaluates the loss again, as line searches and L-BFGS want it, is more "
                "than one pass under one loss scale and one finite flag. Use a transformation without it (for instance "
                "optax.lbfgs(..., linesearch=None), optax.polyak_sgd), or a loop of your own with "
                "polyamp_jax.scaled_value_and_grad."
            ) from error
    except Exception:  # noqa: BLE001  # whatever it is, a step says it
        return


def _takes(run: Any) -> list[str]:
    """Which of the arguments its `update` takes."""
    try:
        parameters = inspect.signature(run.update).parameters
    except (TypeError, ValueError):  # not a Python function
        return []
    hands_on = isinstance(run, optax.GradientTransformationExtraArgs) or isinstance(
        getattr(run.update, "__self__", None), optax.MultiSteps
    )
    if hands_on and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return list(_GIVEN)
    return [name for name in _GIVEN if name in parameters]


def _missing(error: TypeError) -> list[str]:
    """The keyword arguments that a call left out, as Python says it."""
    found = re.search(r"missing \d+ required (?:keyword-only|positional) arguments?: (.*)$", str(error))
    return re.findall(r"'(\w+)'", found[1]) if found else []


def _name(error: TypeError) -> str:
    """The function that asked."""
    return str(error).partition("(")[0].partition(".<locals>")[0]
