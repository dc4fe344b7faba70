"""What the adapters to other libraries' training loops share: what they accept, and a scaler for such loops.

A foreign loop calls `scale`, `unscale_`, `step` and `update` by itself, one optimizer after the other, and knows
nothing of running statistics or overrides. Called by `lightning` and `accelerate`, never by the package itself.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from polyamp.contract import registry
from polyamp.errors import BackendNotInstalledError, GradientError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.rules.plan import Plan
from polyamp_torch.compat import never_compiled
from polyamp_torch.distributed.mixed_precision import check_precision
from polyamp_torch.own_loop.grad_scaler import GradScaler
from polyamp_torch.own_loop.scaler_gradients import parameters_of
from polyamp_torch.precision.autocast import autocast, matmul_precision
from polyamp_torch.precision.bound import BoundModule, device_of
from polyamp_torch.precision.parameter_listing import tree_parameters
from polyamp_torch.precision.paths import plan_for
from polyamp_torch.step import running as buffers


@contextlib.contextmanager
def extra(package: str) -> Iterator[None]:
    """Imports of an optional package; where it is missing the error holds the install command.

    Raises:
        BackendNotInstalledError: the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise BackendNotInstalledError(
            f'polyamp_torch.{package} needs {package}, which is not installed. Run: pip install "polyamp[{package}]"'
        ) from error


class Settings(NamedTuple):
    """A policy that another library's loop can honour, with its scaler.

    Attributes:
        policy: what the forward pass runs under.
        plan: it, resolved without a model.
        scaler: scales the loss and skips steps; None where nothing is scaled or checked.
        device: the type of the device that the model is on, "cuda" or "cpu".
        outside: the policy where no override holds.
    """

    policy: Policy
    plan: Plan
    scaler: LoopScaler | None
    device: str
    outside: Policy

    @classmethod
    def checked(
        cls, policy: Policy | str, scaler: LossScaler | str | None, device: str | None, *, where: str
    ) -> Settings:
        """The settings, or an error that says what `where` cannot do.

        Raises:
            UnsupportedError: `mode="cast"`, or parameters that are not float32.
            RecipeError: a scaler that is none of polyamp's.
        """
        recipe = Recipe(policy=policy, scaler=scaler)
        policy = recipe.policy
        registry.supporting(registry.get("torch"), policy)
        if policy.mode == "cast":
            raise UnsupportedError(
                f"{where} runs the model itself, so nothing can be cast at the model's boundary. Received: "
                "mode='cast'. Use policy.replace(mode='autocast'), or polyamp.train_step."
            )
        if policy.param != "float32":
            raise UnsupportedError(
                f"{where} keeps the model's float32 parameters as masters. Received: param={policy.param!r}. Use "
                "param='float32', or convert the model and run it without a precision of polyamp's."
            )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        own = LoopScaler(recipe.loss_scaler, device=device) if recipe.loss_scaler.checks else None
        return cls(policy, policy.plan(), own, device, policy.replace(overrides={}))

    @property
    def step_was_skipped(self) -> bool:
        """True when the last optimizer step was skipped; reading it waits for the device."""
        return self.scaler is not None and bool(self.scaler.step_was_skipped)

    def bound(self, module: nn.Module) -> list[BoundModule]:
        """The module for `region`, if the policy has overrides that are to be installed in it."""
        if not self.policy.overrides:
            return []
        return [BoundModule(module, plan_for(module, self.policy), torch.device(self.device))]

    def region(self, bound: Sequence[BoundModule] = (), *, enabled: bool = True) -> LoopRegion:
        """The policy's autocast region for one forward pass, with its overrides installed in modules."""
        return LoopRegion(self, bound if enabled else (), enabled=enabled)

    def matmul_precision(self) -> contextlib.AbstractContextManager[None]:
        """The policy's precision of float32 matrix products, for a backward pass."""
        return matmul_precision(self.plan.float32_matmul)

    def remember(self, module: nn.Module) -> None:
        """Keep the running statistics that a forward pass in training is about to move."""
        if self.scaler is not None and module.training and torch.is_grad_enabled():
            self.scaler.remember(module)

    def check_device(self, module: nn.Module) -> None:
        """Refuse a module on another device than that of the region and the scaler."""
        found = device_of(module).type
        if found != self.device:
            raise UnsupportedError(
                f"device={self.device!r} is where polyamp's region and scaler are, but the model is on {found!r}. "
                f"Pass device={found!r}."
            )

    def check_sharding(self, module: nn.Module) -> None:
        """Refuse a module that FSDP2 gathers, or whose gradients it reduces, in other dtypes than the policy says."""
        check_precision(module, plan_for(module, self.policy))

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse an optimizer that evaluates the loss by itself, under a scaler."""
        if self.scaler is not None and isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS evaluates the loss several times a step through a closure, which one finite flag and one scale "
                "cannot cover. Use another optimizer, or a policy without float16 and scaler='off'."
            )


class LoopRegion(autocast):
    """A region of a policy with its overrides, as the libraries' loops open it: a `torch.autocast`, as their own is.

    Args:
        settings: the policy, with or without overrides, and the device.
        bound: the modules in which the overrides are installed inside.
        enabled: False for a region with autocast off.
    """

    def __init__(self, settings: Settings, bound: Sequence[BoundModule] = (), *, enabled: bool = True) -> None:
        super().__init__(settings.outside, settings.device, enabled=enabled)
        self.policy = settings.policy
        self._bound = bound
        self._installed: list[contextlib.ExitStack] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for module in self._bound:
                stack.enter_context(module.installed())
            super().__enter__()
            self._installed.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> bool | None:
        with self._installed.pop():
            return super().__exit__(*error)


never_compiled(LoopRegion.__enter__, LoopRegion.__exit__)


class LoopScaler(GradScaler):
    """`polyamp_torch.GradScaler` for a loop that steps and updates one optimizer after the other.

    `update` waits until the next loss is scaled or the scale is read, so that optimizers that step after one backward
    pass are unscaled once, by one scale, and adjust it once (S14). A skipped step also puts back the running statistics
    of the modules that the optimizer trains, where the adapter had them remembered before the forward pass (S12).
    """

    def __init__(self, scaler: LossScaler, *, device: str) -> None:
        super().__init__(scaler, device=device)
        self._forget()

    def _forget(self) -> None:
        self._update_is_due = False
        self._unscaled: set[int] = set()
        self._flags: weakref.WeakKeyDictionary[torch.optim.Optimizer, torch.Tensor] = weakref.WeakKeyDictionary()
        self._remembered: dict[nn.Module, buffers.Snapshot] = {}

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        own = ("_update_is_due", "_unscaled", "_flags", "_remembered")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def scale(self, outputs: Any) -> Any:
        """The scaled loss; an adjustment that waits is made first."""
        self._settle()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer once, although loop and adapter may both ask for it."""
        if id(optimizer) not in self._unscaled:
            super().unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step or skip, and put back the running statistics of what a skipped optimizer trains.

        Raises:
            GradientError: the optimizer's parameters have no gradients.
        """
        parameters = parameters_of(optimizer)
        here = any(p.grad is not None for p in parameters)
        if here or self._shards.group(parameters) is not None:  # other ranks may have some
            result = super().step(optimizer, *args, **kwargs)
            here = bool(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"])
        if not here:  # of a fused one too, whose update would find no flag
            raise GradientError("step() found no gradients in the optimizer's parameters. Run a backward pass first.")
        (flag,) = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        self._flags[optimizer] = flag
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]} if self._remembered else set()
        for module in list(self._remembered):
            if any(id(p) in trained for _, p in tree_parameters(module)):
                buffers.settle(self._remembered.pop(module), flag == 0.0)
        return result

    def awaits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a loss was scaled that this optimizer has not stepped for."""
        return self._run.of(optimizer).consumed < self._run.calls

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last step of this optimizer was skipped; waits for the device."""
        return optimizer in self._flags and bool(self._flags[optimizer] > 0.0)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Ask for the adjustment, which is made before the next loss is scaled or the scale is read."""
        self._update_is_due = new_scale is None
        if new_scale is not None:
            self._unscaled.clear()
            super().update(new_scale)

    def get_scale(self) -> float:
        """The scale that the next loss is multiplied by; waits for the device."""
        self._settle()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """The state, after the adjustment that waits."""
        self._settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; what waits or is remembered of the run before is dropped."""
        self._forget()
        super().load_state_dict(state_dict)

    def remember(self, module: nn.Module) -> None:
        """Keep the values of a module's buffers as they are before the first forward pass of an update."""
        if module not in self._remembered:
            self._remembered[module] = buffers.snapshot(module)

    def _settle(self) -> None:
        if self._update_is_due:
            self._update_is_due = False
            self._unscaled.clear()
            super().update()
