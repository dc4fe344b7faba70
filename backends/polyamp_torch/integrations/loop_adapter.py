"""Shared parts of the adapters to other libraries' training loops: settings, autocast region and loss scaler.

Such a loop calls `scale`, `unscale_`, `step` and `update` itself, one optimizer after the other. It has no support for
running statistics or overrides.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from polyamp.errors import BackendNotInstalledError, GradientError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.recipe.scaler import LossScaler
from polyamp_torch.compat import skip_compilation
from polyamp_torch.distributed.torch_only.fsdp_mixed_precision import check_fsdp_precision
from polyamp_torch.own_loop.gradients import optimizer_parameters
from polyamp_torch.own_loop.native_scaler import GradScaler
from polyamp_torch.own_loop.torch_only.loop_monitor import LoopMonitor
from polyamp_torch.precision.autocast import autocast, matmul_precision
from polyamp_torch.precision.policy_module import PolicyModule, module_device, resolve_policy
from polyamp_torch.precision.torch_only.named_parameters import tree_parameters
from polyamp_torch.precision.torch_only.op_rules import check_op_rules
from polyamp_torch.step.torch_only import buffers


@contextlib.contextmanager
def require_extra(package: str) -> Iterator[None]:
    """Context manager around the imports of an optional package; if it is missing, the error has the install command.

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


class LoopSettings(NamedTuple):
    """Checked policy and scaler for the loop of another library.

    Attributes:
        policy: the policy of the forward pass.
        plan: the policy, resolved without a model.
        scaler: scales the loss and skips steps; None if nothing is scaled or checked.
        device: the type of the model's device, "cuda" or "cpu".
        outside: the policy without its overrides.
    """

    policy: Policy
    plan: ResolvedPolicy
    scaler: LoopScaler | None
    device: str
    outside: Policy

    @classmethod
    def create(
        cls, policy: Policy | str, scaler: LossScaler | str | None, device: str | None, *, library: str
    ) -> LoopSettings:
        """Return the settings, after checking that the loop of `library` supports them.

        Raises:
            UnsupportedError: the policy has `mode="cast"`, or parameters that are not float32.
            PolicyError: `op_rules` names no function of torch.
            RecipeError: the scaler is not one of polyamp's.
        """
        recipe = Recipe(policy=policy, scaler=scaler)
        policy = recipe.policy
        if policy.mode == "cast":
            raise UnsupportedError(
                f"{library} runs the model itself, so nothing can be cast at the model's boundary. Received: "
                "mode='cast'. Use policy.replace(mode='autocast'), or polyamp.train_step."
            )
        if policy.param != "float32":
            raise UnsupportedError(
                f"{library} keeps the model's float32 parameters as masters. Received: param={policy.param!r}. Use "
                "param='float32', or convert the model and run it without a precision of polyamp's."
            )
        check_op_rules(policy)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        own = LoopScaler(recipe.loss_scaler, device=device) if recipe.loss_scaler.checks else None
        return cls(policy, policy.plan(), own, device, policy.replace(overrides={}))

    @property
    def step_was_skipped(self) -> bool:
        """True when the last optimizer step was skipped; reading it waits for the device."""
        return self.scaler is not None and bool(self.scaler.step_was_skipped)

    def policy_modules(self, module: nn.Module) -> list[PolicyModule]:
        """Return the policy module for `region` if the policy has overrides, else an empty list."""
        if not self.policy.overrides:
            return []
        return [PolicyModule(module, resolve_policy(module, self.policy), torch.device(self.device))]

    def region(self, modules: Sequence[PolicyModule] = (), *, enabled: bool = True) -> LoopRegion:
        """Return the policy's autocast region for one forward pass, with its overrides installed in modules."""
        return LoopRegion(self, modules if enabled else (), enabled=enabled)

    def matmul_precision(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager with the policy's precision of float32 matrix products, for a backward pass."""
        return matmul_precision(self.plan.float32_matmul)

    def snapshot_buffers(self, module: nn.Module) -> None:
        """Save the running statistics before a forward pass in training mode updates them."""
        if self.scaler is not None and module.training and torch.is_grad_enabled():
            self.scaler.snapshot_buffers(module)

    def check_device(self, module: nn.Module) -> None:
        """Raise if a module is on another device than the region and the scaler."""
        found = module_device(module).type
        if found != self.device:
            raise UnsupportedError(
                f"device={self.device!r} is where polyamp's region and scaler are, but the model is on {found!r}. "
                f"Pass device={found!r}."
            )

    def check_sharding(self, module: nn.Module) -> None:
        """Raise if FSDP2 gathers a module, or reduces its gradients, in other dtypes than the policy defines."""
        check_fsdp_precision(module, resolve_policy(module, self.policy))

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise for an optimizer that evaluates the loss itself, if there is a scaler."""
        if self.scaler is not None and isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS evaluates the loss several times a step through a closure, which one finite flag and one scale "
                "cannot cover. Use another optimizer, or a policy without float16 and scaler='off'."
            )


class LoopRegion(autocast):
    """Autocast region of a policy and its overrides: a `torch.autocast`, as the libraries' loops expect.

    Args:
        settings: the policy, with or without overrides, and the device.
        modules: the modules in which the overrides are installed inside.
        enabled: False for a region with autocast off.
    """

    def __init__(self, settings: LoopSettings, modules: Sequence[PolicyModule] = (), *, enabled: bool = True) -> None:
        super().__init__(settings.outside, settings.device, enabled=enabled)
        self.policy = settings.policy
        self._modules = modules
        self._installed: list[contextlib.ExitStack] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(module.installed())
            super().__enter__()
            self._installed.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> bool | None:
        with self._installed.pop():
            return super().__exit__(*error)


skip_compilation(LoopRegion.__enter__, LoopRegion.__exit__)


class LoopScaler(GradScaler):
    """`polyamp_torch.GradScaler` for a loop that steps and updates one optimizer after the other.

    `update` is deferred until the next loss is scaled or the scale is read. So optimizers that step after one backward
    pass are unscaled once, by one scale, and adjust it once (S14). A skipped step also restores the running statistics
    of the modules that the optimizer trains, if the adapter saved them before the forward pass (S12).
    """

    def __init__(self, scaler: LossScaler, *, device: str) -> None:
        super().__init__(scaler, device=device)
        self._reset_loop()

    def _reset_loop(self) -> None:
        self._update_is_due = False
        self._unscaled: set[int] = set()
        self._flags: weakref.WeakKeyDictionary[torch.optim.Optimizer, torch.Tensor] = weakref.WeakKeyDictionary()
        self._snapshots: dict[nn.Module, buffers.BufferSnapshot] = {}

    def __getstate__(self) -> dict[str, Any]:
        self.apply_update()
        own = ("_update_is_due", "_unscaled", "_flags", "_snapshots")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_loop()

    def scale(self, outputs: Any) -> Any:
        """Return the scaled loss, after any deferred update."""
        self.apply_update()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer once, even if loop and adapter both call this."""
        if id(optimizer) not in self._unscaled:
            super().unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step or skip; a skip also restores the running statistics of the modules that the optimizer trains.

        Raises:
            GradientError: the optimizer's parameters have no gradients.
        """
        parameters = optimizer_parameters(optimizer)
        here = any(p.grad is not None for p in parameters)
        if here or self._ranks.group(parameters) is not None:  # other ranks may have some
            result = super().step(optimizer, *args, **kwargs)
            here = bool(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"])
        if not here:  # fused optimizers too: their update would find no flag
            raise GradientError("step() found no gradients in the optimizer's parameters. Run a backward pass first.")
        (flag,) = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        self._flags[optimizer] = flag
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]} if self._snapshots else set()
        for module in list(self._snapshots):
            if any(id(p) in trained for _, p in tree_parameters(module)):
                buffers.commit_or_rollback(self._snapshots.pop(module), flag == 0.0)
        return result

    def monitor_by(self, monitoring: LoopMonitor | None) -> None:
        """Tell the loop's steps to a monitor from now on; None for no monitor."""
        self._monitoring = monitoring

    def has_scaled_loss(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a loss was scaled since this optimizer's last step."""
        return self._loop.record_of(optimizer).last_call < self._loop.calls

    def has_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the last step of this optimizer was skipped; waits for the device."""
        return optimizer in self._flags and bool(self._flags[optimizer] > 0.0)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Request an update of the scale, made before the next loss is scaled or the scale is read."""
        self._update_is_due = new_scale is None
        if new_scale is not None:
            self._unscaled.clear()
            super().update(new_scale)

    def get_scale(self) -> float:
        """Return the scale that the next loss is multiplied by; waits for the device."""
        self.apply_update()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, after any deferred update."""
        self.apply_update()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; drop deferred updates and saved running statistics."""
        self._reset_loop()
        super().load_state_dict(state_dict)

    def snapshot_buffers(self, module: nn.Module) -> None:
        """Save the values of a module's buffers before the first forward pass of an update."""
        if module not in self._snapshots:
            self._snapshots[module] = buffers.snapshot(module)

    def apply_update(self) -> None:
        """Make an update of the scale that was requested."""
        if self._update_is_due:
            self._update_is_due = False
            self._unscaled.clear()
            super().update()
