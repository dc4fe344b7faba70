"""`explain`: the casting report of a function or a model under a policy."""

from __future__ import annotations

from typing import Any

from polyamp import backend_lookup as lookup
from polyamp.contract import registry
from polyamp.contract.backend import HasCastingReports, HasCompiledCastingReports
from polyamp.contract.casting_report import CastingReport
from polyamp.errors import ModelError, UnsupportedError
from polyamp.recipe.policy import Policy


def explain(
    target: Any,
    policy: Policy | str,
    *inputs: Any,
    strict: bool = False,
    compiled: bool = False,
    backend: str | None = None,
    **options: Any,
) -> CastingReport:
    """Report the dtype of each operation of `target(*inputs)` under a policy, and the rule that decided it.

    Args:
        target: a function or a model, as for `policy.autocast`; or `loss_fn`, with `model, batch` as inputs, whose
            backward pass is listed too. torch and Keras run it once, on copies of models; JAX traces it.
        policy: the policy, or its spelling.
        *inputs: the arguments; arrays of the framework, or its descriptions of array shapes.
        strict: raise for an operation that no op list names.
        compiled: report what compiled code runs instead of eager code. `report.notes` says what cannot be seen there.
        backend: its name; by default that of the target, of the first input that is an array of a framework (NumPy
            does not decide), or of the framework that the function names.
        **options: of `polyamp.init`, for a loss function with its model, such as `axis_name` of an equinox module.

    Raises:
        ModelError: a training state in place of its model.
        PolicyError: no policy, such as a model in its place.
        UnsupportedError: the backend has no casting reports, or none of compiled code, or the function cannot be
            compiled; or with `strict`, an operation has no rule.
        TraceError: the target cannot be traced.

    Example:
        >>> import jax, jax.numpy as jnp, polyamp
        >>> layer = lambda w, x: jnp.exp(x @ w)
        >>> print(polyamp.explain(layer, polyamp.Policy("mixed_float16"), jnp.ones((2, 3)), jnp.ones((4, 2))))
        Policy(param='float32', compute='float16', output='float32') [mixed: float32 master weights]
        <BLANKLINE>
        module  operation    dtype    rule     count
        ------  -----------  -------  -------  -----
        .       dot_general  float16  compute      1
        .       exp          float32  float32      1
        <BLANKLINE>
        casts: 1 float16 -> float32, 2 float32 -> float16
        opaque: none
    """
    for given in (target, *inputs):
        if hasattr(given, "scale_state"):
            raise ModelError(f"explain takes a model. Received: a {type(given).__name__}. Pass its model: state.model.")
    policy = Policy.of(policy, "explain(loss_fn, policy, model, batch), or explain(model, policy, *inputs)")
    chosen = registry.get(backend) if backend is not None else lookup.backend_of_call(target, inputs)
    name = chosen.name
    if not isinstance(chosen, HasCastingReports):
        raise UnsupportedError(
            f"explain: the {name} backend of this version cannot say which dtype each operation runs in."
        )
    if compiled:
        if not isinstance(chosen, HasCompiledCastingReports):
            raise UnsupportedError(
                f"explain(compiled=True): the {name} backend of this version reports eager code only."
            )
        return chosen.explain_compiled(target, policy, *inputs, strict=strict, **options)
    return chosen.explain(target, policy, *inputs, strict=strict, **options)
