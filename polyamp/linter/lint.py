"""`lint`: names the faults of precision in a training set-up that does not use polyamp."""

from __future__ import annotations

from typing import Any

import msgspec

from polyamp.contract import registry
from polyamp.errors import ArgumentError, UnsupportedError, describe_value
from polyamp.linter.lint_report import LintReport
from polyamp.linter.lint_rules import apply_rules
from polyamp.linter.setup_figures import InspectsSetups, TrainingSetup
from polyamp.recipe.policy import Policy


def lint(
    model: Any,
    *,
    optimizer: Any = None,
    opt_state: Any = None,
    scaler: Any = None,
    loss_fn: Any = None,
    batch: Any = None,
    step: Any = None,
    policy: Policy | str | None = None,
    backend: str | None = None,
) -> LintReport:
    """Name the faults of precision in a training of your own, which need not use polyamp.

    It looks for trained parameters and moments in 16 bits, with the share of the weights that did not move in one step;
    a norm or softmax in 16 bits; a scaler without float16, and float16 without a scaler; a clip of gradients that are
    still scaled; and a head in 16 bits, or covered by a glob. Each rule needs some of the arguments; the report lists
    those that could not be checked.

    The pass and the update run on copies, uncompiled. What you pass is afterwards as it was, bit for bit.

    Args:
        model: torch: an `nn.Module`; Keras: a built model; JAX: a pytree of parameters.
        optimizer: torch: that of the parameters; Keras: by default that of `model.compile`; JAX: an optax
            transformation.
        opt_state: JAX: its state; by default a new one.
        scaler: what scales the loss: torch: a `GradScaler`; Keras: by default the optimizer, if it is a
            `LossScaleOptimizer`; JAX: a number, or an object with a number in `loss_scale`, `scale` or `init_scale`.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss, under the autocast that you train with.
        batch: one batch.
        step: torch: `step()` runs one whole step of your own loop, with the objects that you pass. Model, optimizer,
            scaler and random generators are put back; what else it moves, such as a schedule, goes on.
        policy: a policy of polyamp's that you use, or mean to: its overrides are checked for globs that cover the head.
        backend: its name, if the model does not determine it.

    Raises:
        ArgumentError: an argument that the framework does not take, or a part of what belongs together.
        UnsupportedError: the backend cannot inspect set-ups.

    Example:
        >>> import jax.numpy as jnp, optax, polyamp
        >>> report = polyamp.lint({"kernel": jnp.ones((4, 2), "bfloat16")}, optimizer=optax.adamw(1e-5))
        >>> [finding.rule for finding in report.findings]
        ['parameters_in_16_bits', 'moments_in_16_bits']
    """
    if (loss_fn is None) != (batch is None):
        given, absent = ("loss_fn", "batch") if batch is None else ("batch", "loss_fn")
        raise ArgumentError(f"lint: loss_fn and batch belong together. Received: {given} alone. Pass {absent}= too.")
    for name, value in (("loss_fn", loss_fn), ("step", step)):
        if value is not None and not callable(value):
            raise ArgumentError(f"lint: {name} must be a function. Received: {describe_value(value)}.")
    chosen = registry.get(backend) if backend is not None else registry.backend_for(model)
    if not isinstance(chosen, InspectsSetups):
        raise UnsupportedError(f"lint: the {chosen.name} backend of this version cannot inspect set-ups.")
    setup = TrainingSetup(model, optimizer, opt_state, scaler, loss_fn, batch, step)
    overrides = None if policy is None else dict(Policy.of(policy).overrides)
    figures = msgspec.structs.replace(chosen.inspect_setup(setup), overrides=overrides)
    findings, unchecked = apply_rules(figures)
    return LintReport(backend=figures.backend, findings=findings, unchecked=unchecked)
