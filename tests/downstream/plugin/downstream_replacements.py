"""What polyamp replaces in a framework or a package, by name. Each counts how often the program used it."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

USES: Final[Counter[str]] = Counter()
"""Name of a class or function of polyamp -> how often the program made or called it."""


def _count_instances(cls: type, name: str) -> None:
    """Count the instances of a class in `USES`, subclasses' too."""
    original: Any = cls.__init__

    @functools.wraps(original)
    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        USES[name] += 1
        original(self, *args, **kwargs)

    cls.__init__ = counted  # type: ignore[misc]  # a wrapper of the same signature


def _replace_everywhere(old: Any, new: Any) -> None:
    """Bind `new` in every imported module that has `old` among its names, polyamp's own modules excepted."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith(("polyamp", "downstream_")):
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def autocast() -> None:
    """`torch.autocast` and its older names: `polyamp_torch.autocast`, with the same arguments."""
    import torch

    import polyamp_torch

    _count_instances(polyamp_torch.autocast, "autocast")
    for module in (torch, torch.amp, torch.amp.autocast_mode):
        module.autocast = polyamp_torch.autocast  # type: ignore[attr-defined]  # put in its place

    def cuda_autocast(*args: Any, **kwargs: Any) -> Any:
        return polyamp_torch.autocast("cuda", *args, **kwargs)

    torch.cuda.amp.autocast = cuda_autocast  # type: ignore[assignment,misc]  # put in its place


def grad_scaler() -> None:
    """`torch.amp.GradScaler` and its older names: `polyamp_torch.GradScaler`, with the same arguments."""
    import torch

    import polyamp_torch

    _count_instances(polyamp_torch.GradScaler, "GradScaler")
    for module in (torch, torch.amp, torch.amp.grad_scaler, torch.cuda.amp):
        module.GradScaler = polyamp_torch.GradScaler  # type: ignore[attr-defined]  # put in its place


def accelerator() -> None:
    """`accelerate.Accelerator`: `polyamp_torch.accelerate.Accelerator`, with the same arguments."""
    import accelerate

    from polyamp_torch.accelerate import Accelerator

    _count_instances(Accelerator, "Accelerator")
    _replace_everywhere(accelerate.Accelerator, Accelerator)


def lightning_precision() -> None:
    """Lightning's plugins of mixed precision: those of `polyamp_torch.lightning`."""
    from lightning.fabric.plugins import MixedPrecision as NativeFabric
    from lightning.pytorch.plugins import MixedPrecision as NativeTrainer

    from polyamp_torch.lightning import FabricPrecision, MixedPrecision

    class TrainerPlugin(MixedPrecision):
        """polyamp's plugin, made as Lightning makes its own."""

        def __init__(self, precision: str, device: str) -> None:
            super().__init__(precision, device=device)

    class FabricPlugin(FabricPrecision):
        """As above, for Fabric."""

        def __init__(self, precision: str, device: str) -> None:
            super().__init__(precision, device=device)

    _count_instances(MixedPrecision, "MixedPrecision")
    _count_instances(FabricPrecision, "FabricPrecision")
    _replace_everywhere(NativeTrainer, TrainerPlugin)
    _replace_everywhere(NativeFabric, FabricPlugin)


def keras_loss_scale_optimizer() -> None:
    """`keras.optimizers.LossScaleOptimizer`: `polyamp_tensorflow.LossScaleOptimizer`, with the same arguments."""
    import keras

    from polyamp_tensorflow import LossScaleOptimizer

    native = keras.optimizers.LossScaleOptimizer
    _count_instances(LossScaleOptimizer, "LossScaleOptimizer")
    _replace_everywhere(native, LossScaleOptimizer)
    sys.modules[native.__module__].LossScaleOptimizer = LossScaleOptimizer  # type: ignore[attr-defined]  # in its place


_LIBRARIES: Final = ("jax", "flax", "haiku", "equinox", "optax", "polyamp", "polyamp_jax")
"""Packages whose own calls of `jax.grad` are left alone: polyamp goes into the program."""


def gradients() -> None:
    """`jax.grad`, `jax.value_and_grad` and flax's and equinox's forms of them: `polyamp_jax.scaled_value_and_grad` with
    a loss scale of 1024, under "mixed_bfloat16". It is counted once per trace.

    A model among the arguments runs by `policy.autocast(model)`, a function of arrays by `polyamp_jax.autocast`.
    """
    import equinox
    import jax
    from flax import nnx

    import polyamp
    import polyamp_jax

    policy, scaler = polyamp.Policy("mixed_bfloat16"), polyamp.LossScaler.static(1024.0)

    def transform(fun: Callable[..., Any], with_value: bool, argnums: Any, has_aux: bool) -> Callable[..., Any]:
        def under_policy(*args: Any, **kwargs: Any) -> Any:
            models = [isinstance(each, (nnx.Module, equinox.Module)) for each in args]
            if not any(models):
                return polyamp_jax.autocast(fun, policy)(*args, **kwargs)
            wrapped = (policy.autocast(each) if model else each for each, model in zip(args, models, strict=True))
            return fun(*wrapped, **kwargs)

        graded = polyamp_jax.scaled_value_and_grad(under_policy, scaler, argnums=argnums, has_aux=has_aux)

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            USES["scaled_value_and_grad"] += 1
            value, grads, _ = graded(scaler.init("jax"), *args, **kwargs)
            if with_value:
                return value, grads
            return (grads, value[1]) if has_aux else grads

        return call

    def replace(module: Any, name: str, with_value: bool) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def replaced(fun: Any, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if caller in _LIBRARIES:
                return original(fun, argnums=argnums, has_aux=has_aux, **options)
            if options:
                raise TypeError(f"{name} by polyamp takes argnums and has_aux here. Received: {sorted(options)}.")
            return transform(fun, with_value, argnums, has_aux)

        setattr(module, name, replaced)

    for module in (jax, nnx):
        replace(module, "grad", False)
        replace(module, "value_and_grad", True)

    def filter_form(with_value: bool) -> Callable[..., Any]:
        def filtered(fun: Any = None, *, has_aux: bool = False) -> Any:
            if fun is None:
                return functools.partial(filtered, has_aux=has_aux)
            return transform(fun, with_value, 0, has_aux)

        return filtered

    equinox.filter_grad, equinox.filter_value_and_grad = filter_form(False), filter_form(True)


def jmp_policy() -> None:
    """`jmp.Policy` and `jmp.get_policy`: `polyamp.Policy` with the names of jmp's attributes."""
    import jax.numpy as jnp
    import jmp
    from jmp._src import policy as module

    import polyamp

    _count_instances(polyamp.Policy, "Policy")

    class Policy:
        """A `polyamp.Policy` with the names of jmp's."""

        def __init__(self, param_dtype: Any, compute_dtype: Any, output_dtype: Any) -> None:
            self.policy = polyamp.Policy(param=param_dtype, compute=compute_dtype, output=output_dtype, mode="cast")
            self.param_dtype, self.compute_dtype, self.output_dtype = (
                jnp.dtype(each) for each in (self.policy.param, self.policy.compute, self.policy.output)
            )
            self.cast_to_param = self.policy.cast_to_param
            self.cast_to_compute = self.policy.cast_to_compute
            self.cast_to_output = self.policy.cast_to_output

        def __str__(self) -> str:
            return self.policy.spelled("jmp")

        def with_output_dtype(self, output_dtype: Any) -> Policy:
            return Policy(self.param_dtype, self.compute_dtype, output_dtype)

    def get_policy(word: str) -> Policy:
        policy = polyamp.Policy.of(word)
        return Policy(policy.param, policy.compute, policy.output)

    for each in (jmp, module):
        each.Policy, each.get_policy = Policy, get_policy


REPLACEMENTS: Final[dict[str, Callable[[], None]]] = {
    "torch.autocast": autocast,
    "torch.amp.GradScaler": grad_scaler,
    "jax.grad and jax.value_and_grad": gradients,
    "jmp.Policy": jmp_policy,
    "keras.optimizers.LossScaleOptimizer": keras_loss_scale_optimizer,
    "accelerate.Accelerator": accelerator,
    "lightning MixedPrecision": lightning_precision,
}
"""What is replaced, as the page names it -> the function that replaces it."""
