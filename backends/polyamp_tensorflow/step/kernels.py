"""SGD, Adam and AdamW by TensorFlow's training kernels: one pass over a parameter in the place of a dozen operations.

The kernels' formulas are not PyTorch's as they stand; the scalars given to them make them so (S21). Called by
`optimizers.SpecOptimizer`, which runs a spec's own formula where there is no kernel for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import tensorflow as tf

from polyamp.recipe.optimizers import SGD, Adam, AdamW

Update = Callable[[int, Any, Any, Mapping[str, Any]], None]
"""`update(index, variable, gradient, slots)`: writes the variable and its slots, all of them float32 `tf.Variable`s."""

_SMALLEST_BETA: Final = 0.5
"""The kernel adds `(1 - beta2) * (g^2 - v)` to v: with beta2 near 0, a large v leaves nothing of a small g."""


def kernel(spec: Any, rate: Any, counts: Any) -> Update | None:
    """The update of one parameter by a spec, or None where TensorFlow has no kernel with the formula.

    What all parameters share is computed once, here.

    Args:
        spec: one of polyamp's optimizer specs.
        rate: learning rate, scalar tensor.
        counts: by index of the parameter, the number of this update among its own, starting at 1; vector of the same
            dtype.
    """
    if isinstance(spec, SGD):
        return _sgd(spec, rate)
    if isinstance(spec, Adam | AdamW) and min(spec.betas) >= _SMALLEST_BETA:
        return _adam(spec, rate, counts)
    return None


def _sgd(spec: SGD, rate: Any) -> Update:
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


def _adam(spec: Adam | AdamW, rate: Any, counts: Any) -> Update:
    """TensorFlow's kernel multiplies the rate by `sqrt(1 - beta2^n) / (1 - beta1^n)` and adds epsilon to a root that is
    not corrected. Epsilon times the root's correction makes that PyTorch's formula.

    The powers are kept from the kernel, which loses digits in `1 - beta2^n`; and they are powers of the betas as
    float32 has them, since the kernel's `1 - beta2` is: at 0.999 that is 1.3e-5 away from 0.001.
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
