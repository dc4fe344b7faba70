"""`KerasPolicyModule`: a Keras model on torch as `loss_fn` sees it, with the policy on its layers (S1, S3, S5).

The layers cast, each to its own dtype, as in Keras on every backend. `torch.autocast` does not act in a call of the
model: a float32 layer of Keras, whose operands are float32 tensors, would be cast back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.engines.torch import keep_assignments
from polyamp_keras.interrupts import EnsureUndo
from polyamp_keras.interrupts import close_stale_blocks as close_stale_keras_blocks
from polyamp_keras.models.layers import build_by_call, is_built
from polyamp_keras.precision import apply_policy
from polyamp_keras.precision.bound_model import BoundKerasModel, bound_parameters, native_model, root_model
from polyamp_keras.precision.policy_application import PolicyTemplate
from polyamp_torch.compat import NULL_CONTEXT
from polyamp_torch.precision.autocast import matmul_precision
from polyamp_torch.precision.torch_only.autocast_region_stack import autocast_nesting, close_stale_blocks, shield
from polyamp_torch.precision.torch_only.open_blocks import OPEN_BLOCKS


class KerasPolicyModule(BoundKerasModel):
    """Keras model under a policy (`BoundKerasModel`), with the methods of `PolicyModule` that a step calls.

    Inside the step the policy is on the layers around the whole of `loss_fn` and its backward pass, so that calls of
    layers are covered too. Elsewhere each call puts it there for itself.

    Args:
        model: the model, or a layer of it. It is built.
        plan: the resolved policy.
        parameters: the model's trainable variables by name, if known.
        whole: for a layer, the bound model that contains it.
        in_step: whether calls are in training mode by default, as in `loss_fn`.
    """

    _in_step: bool
    _template: PolicyTemplate
    _variables: list[Any]

    def __init__(
        self,
        model: Any,
        plan: ResolvedPolicy,
        parameters: Mapping[str, Any] | None = None,
        whole: KerasPolicyModule | None = None,
        *,
        in_step: bool = True,
    ) -> None:
        super().__init__(model, plan, parameters, whole)
        self._in_step = in_step if whole is None else whole._in_step
        self._template = PolicyTemplate(model, plan) if whole is None else whole._template
        self._variables = [*getattr(model, "variables", ())] if whole is None else whole._variables
        self._depth = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output with floating tensors in the policy's output dtype."""
        return super().__call__(*args, **kwargs) if self._in_step else self._under_policy(self._model, args, kwargs)

    def __repr__(self) -> str:
        return f"KerasPolicyModule({self._model!r}, {self._plan.policy!r})"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which the layers follow the policy, and what they assign to variables is kept."""
        close_stale_blocks()
        close_stale_keras_blocks()
        application = self._template.application()
        bound, before = OPEN_BLOCKS.bound, OPEN_BLOCKS.bound.count(self)

        def undo() -> None:
            application.restore()
            while bound.count(self) > before:
                bound.remove(self)

        with EnsureUndo(undo), keep_assignments(self._variables):
            application.put()
            bound.append(self)
            self._depth = _foreign_nesting()
            yield

    @contextlib.contextmanager
    def _policy_region(self) -> Iterator[ResolvedPolicy]:
        """Context manager in which the layers follow the innermost policy (S3), and torch's autocast does not act."""
        whole: KerasPolicyModule = self._whole
        plan, around = self._plan, whole
        if whole in OPEN_BLOCKS.bound:
            policy = self._function_policy()
            if policy is not None:
                plan = resolve_policy(root_model(self), policy)
                around = KerasPolicyModule(root_model(self), plan)
            else:
                self._refuse_regions()
        inside = around in OPEN_BLOCKS.bound
        with (
            NULL_CONTEXT if inside else around.installed(),
            NULL_CONTEXT if inside else matmul_precision(plan.float32_matmul),
            shield(),
        ):
            yield plan

    def _function_policy(self) -> Policy | None:
        """Return the policy of the function in `loss_fn` that calls the model, if there is one."""
        if not OPEN_BLOCKS.functions:
            return None
        policy, outside = OPEN_BLOCKS.functions[-1]
        found: Policy | None = policy if self._whole in OPEN_BLOCKS.bound[:outside] else None
        return found

    def _refuse_regions(self) -> None:
        """Raise for a region that `loss_fn` has opened around a call of the model.

        Raises:
            UnsupportedError: names what to write instead.
        """
        if _foreign_nesting() > self._whole._depth:
            raise UnsupportedError(
                "torch.autocast around a call of a Keras model in loss_fn: its layers choose their dtypes by the policy"
                f", and a float32 layer of Keras casts back. Received: a region around {type(self._model).__name__}. "
                "Write policy.autocast(function) for what is to run under another policy, or overrides for layers."
            )

    # What a step calls.

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Return the context manager around `loss_fn`: nothing there casts but the layers, as in Keras."""
        return NULL_CONTEXT

    def trainable(self) -> dict[str, torch.Tensor]:
        """Return the trainable weights by `/`-separated path."""
        return keras_parameters(self)

    def commit(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return an empty list: no casts replace parameters."""
        return []

    def written(self) -> list[torch.Tensor]:
        """Return an empty list: no casts replace parameters."""
        return []

    def discard(self) -> None:
        """Do nothing: no casts replace parameters."""

    def check_pass(self) -> None:
        """Do nothing: rules that reach no layer are an error before the first step."""

    def check_overrides_ran(self) -> None:
        """Do nothing: the dtype of a layer acts wherever its code runs."""


def keras_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Return the trainable weights of a Keras model, or of a bound one, by `/`-separated path.

    Raises:
        ModelError: the model is not built.
    """
    return {name: variable.value for name, variable in bound_parameters(model).items()}


def resolve_policy(model: Any, policy: Policy) -> ResolvedPolicy:
    """Resolve a policy for a Keras model on torch.

    Raises:
        PolicyError: an override or a rule matches no layer.
        UnsupportedError: Keras cannot follow the policy on torch.
    """
    if policy.param == "float64":
        raise UnsupportedError(
            "on torch Keras computes with 64-bit numbers in 32 bits, whatever the dtype of its layers. Received: "
            f"{policy}. Use param='float32', Keras on TensorFlow, or a model of torch's own layers."
        )
    return apply_policy.resolve_policy(model, policy)


def keras_autocast(target: Any, policy: Policy) -> Callable[..., Any]:
    """Return a Keras model or layer, or a bound one, under a policy. The first call builds an unbuilt one.

    Raises:
        UnsupportedError, PolicyError: it cannot follow the policy.
    """
    bound = isinstance(target, KerasPolicyModule)
    model = native_model(target)
    plan = resolve_policy(model, policy)
    if is_built(model):
        return KerasPolicyModule(model, plan, in_step=bound and target._in_step)
    made: list[KerasPolicyModule] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            build_by_call(model, args, kwargs)
            made.append(KerasPolicyModule(model, resolve_policy(model, policy), in_step=False))
        return made[0](*args, **kwargs)

    return call


def _foreign_nesting() -> int:
    """Return the number of open regions of autocast that the program has written itself, torch's and polyamp's."""
    own = sum(block.owner is None for block in OPEN_BLOCKS.regions)
    return autocast_nesting() - own
