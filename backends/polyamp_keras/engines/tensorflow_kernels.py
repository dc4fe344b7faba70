"""SGD, Adam and AdamW with TensorFlow's training kernels: one pass over a parameter instead of a dozen operations.

The kernels' formulas differ from PyTorch's; adapted scalar arguments make them equal (S21). Without a kernel,
`optimizers.SpecOptimizer` runs the spec's own formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import tensorflow as tf

from polyamp.recipe.optimizer_formulas.adam import Adam, AdamW
from polyamp.recipe.optimizer_formulas.sgd import SGD

ParameterUpdate = Callable[[int, Any, Any, Mapping[str, Any]], None]
"""`update(index, variable, gradient, slots)`: writes the variable and its slots, all float32 `tf.Variable`s."""

_SMALLEST_BETA: Final = 0.5
"""Smallest beta for the kernel, which adds `(1 - beta2) * (g^2 - v)` to v: near 0, a large v absorbs a small g."""


def kernel_update(spec: Any, rate: Any, counts: Any) -> ParameterUpdate | None:
    """Return the update of one parameter by a spec, or None if TensorFlow has no kernel for the formula.

    Values that all parameters share are computed once, here.

    Args:
        spec: one of polyamp's optimizer specs.
        rate: learning rate, scalar tensor.
        counts: by index of the parameter, the number of its current update, starting at 1; vector of the same dtype.
    """
    if isinstance(spec, SGD):
        return _sgd_update(spec, rate)
    if isinstance(spec, Adam | AdamW) and not spec.amsgrad and min(spec.betas) >= _SMALLEST_BETA:
        return _adam_update(spec, rate, counts)
    return None


def _sgd_update(spec: SGD, rate: Any) -> ParameterUpdate:
    def update(index: int, variable: Any, gradient: Any, slots: Mapping[str, Any]) -> None:
        if spec.weight_decay:
            gradient = gradient + spec.weight_decay * variable
        if not spec.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=slots["momentum"].handle,
            lr=rate,
            grad=gradient,
            momentum=tf.cast(spec.momentum, rate.dtype),
            use_nesterov=spec.nesterov,
        )

    return update


def _adam_update(spec: Adam | AdamW, rate: Any, counts: Any) -> ParameterUpdate:
    """Return the update by TensorFlow's Adam kernel, with epsilon adapted to PyTorch's formula.

    The kernel multiplies the rate by `sqrt(1 - beta2^n) / (1 - beta1^n)` and adds epsilon to the uncorrected root. So
    epsilon is multiplied by the root's correction.

    The powers are computed outside the kernel, which loses digits in `1 - beta2^n`. They are powers of the float32
    betas, as is the kernel's `1 - beta2`: at 0.999 it differs from 0.001 by a relative 1.3e-5.
    """
    betas = [float(np.float32(beta)) for beta in spec.betas]
    beta1, beta2 = (tf.constant(beta, rate.dtype) for beta in betas)
    correction1, correction2 = (_one_minus_power(beta, counts) for beta in betas)
    root = tf.sqrt(correction2)
    rates, epsilons, zero = tf.unstack(rate * root / correction1), tf.unstack(spec.eps * root), tf.zeros((), rate.dtype)
    decay = spec.weight_decay

    def update(index: int, variable: Any, gradient: Any, slots: Mapping[str, Any]) -> None:
        if decay and isinstance(spec, AdamW):
            variable.assign(variable * (1.0 - rate * decay), read_value=False)
        elif decay:
            gradient = gradient + decay * variable
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=slots["exp_avg"].handle,
            v=slots["exp_avg_sq"].handle,
            beta1_power=zero,
            beta2_power=zero,
            lr=rates[index],
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilons[index],
            grad=gradient,
        )

    return update


def _one_minus_power(beta: float, counts: Any) -> Any:
    return -tf.math.expm1(counts * math.log(beta))
