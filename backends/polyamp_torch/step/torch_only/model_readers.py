"""`ModuleReader`: what a training state reads of a model, of whatever kind; `keras_models` has that of Keras models."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from polyamp.errors import ModelError, UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules.parameter_kinds import ParameterLeaf
from polyamp_torch.compat import (
    NULL_CONTEXT,
    compiled_call_of_module,
    is_compiled,
    module_children,
    module_parameters,
)
from polyamp_torch.distributed.torch_only.fsdp_mixed_precision import check_fsdp_precision
from polyamp_torch.precision.policy_module import PolicyModule, resolve_policy
from polyamp_torch.precision.torch_only.compat import compiled_code_runs_eagerly
from polyamp_torch.precision.torch_only.float8_watch import OPEN_WATCHES, ProductWatch
from polyamp_torch.precision.torch_only.keras_layers import has_keras_layer
from polyamp_torch.precision.torch_only.named_parameters import check_parameter_listing, tree_parameters
from polyamp_torch.precision.torch_only.unwrapped_paths import (
    parameter_leaves,
    path_function,
    short_paths,
    unwrapped_paths,
)
from polyamp_torch.step.torch_only.buffers import BufferOwners, find_buffer_owners

Parameters = dict[str, nn.Parameter]
"""Path, `/`-separated -> parameter."""


class ModuleReader:
    """Reader of an `nn.Module`: the names of its tensors, its running state, and how it follows a policy.

    Args:
        model: the model.

    Attributes:
        model: the model.
        adds_losses: whether modules of this kind add losses of their own (S25).
    """

    adds_losses = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._path = path_function(model)

    def check(self, recipe: Recipe, engine: str | None) -> None:
        """Raise for a model that no state can train.

        Args:
            recipe: the recipe.
            engine: the parallel engine of the model, or None.

        Raises:
            ModelError: a lazy module has no parameters yet.
            UnsupportedError: a parallel engine around Keras layers.
        """
        for kind, named in (("parameter", tree_parameters(self.model)), ("buffer", _tree_buffers(self.model))):
            for name, value in named:
                if nn.parameter.is_lazy(value):
                    raise ModelError(
                        f"{kind} {name.replace('.', '/')!r} has no shape yet. Call the model once on a batch, which "
                        "makes the parameters of its lazy modules, then polyamp.init."
                    )
        if engine is not None and has_keras_layer(self.model):
            raise keras_engine_error(engine)

    def check_listing(self, recipe: Recipe, trained: Parameters) -> None:
        """Raise if the model's own listing of parameters differs from what is trained, for a spec."""
        if is_spec(recipe.optimizer):
            check_parameter_listing(self.model, trained)

    def parameters(self) -> Parameters:
        """Return every parameter, frozen ones included, by path."""
        return {self._path(name): p for name, p in tree_parameters(self.model)}

    def trained(self) -> Parameters:
        """Return the parameters that require a gradient, by path."""
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    def frozen(self) -> Parameters:
        """Return the other parameters, by path."""
        return {name: p for name, p in self.parameters().items() if not p.requires_grad}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the running state by path."""
        return {self._path(name): b for name, b in _tree_buffers(self.model)}

    def buffer_owners(self) -> BufferOwners:
        """Return the places of the running state."""
        return find_buffer_owners(self.model)

    def random_streams(self) -> dict[str, torch.Tensor]:
        """Return the random streams that the model itself has, by path; torch's generators are not among them."""
        return {}

    def leaves(self, trained: Parameters) -> Sequence[ParameterLeaf]:
        """Return what parameter groups match (S27)."""
        return parameter_leaves(self.model, trained)

    def module_paths(self) -> Iterable[str]:
        """Return the paths of the modules, which aliases may name."""
        return itertools.chain.from_iterable(unwrapped_paths(self.model).items())

    def plan(self, policy: Policy) -> ResolvedPolicy:
        """Return the policy, resolved for the model.

        Raises:
            PolicyError, UnsupportedError: the model cannot follow it.
        """
        plan = resolve_policy(self.model, policy)
        check_fsdp_precision(self.model, plan)
        return plan

    def bind(self, plan: ResolvedPolicy, device: torch.device) -> Any:
        """Return the model as `loss_fn` sees it."""
        return PolicyModule(self.model, plan, device)

    def slots(self) -> list[dict[str, Any]]:
        """Return the parameter and child dicts of every module, whose contents a step compares with those of `init`."""
        return [slots for part in self.model.modules() for slots in (module_parameters(part), module_children(part))]

    def changed(self) -> str | None:
        """Return what has changed in the structure of the model beyond `slots`, the start of a sentence; or None."""
        return None

    def output_modules(self) -> dict[str, nn.Module]:
        """Return path -> module of all that run one by one: of a wrapper the module in it, and of what `torch.compile`
        made one function the whole."""
        short = short_paths(self.model)
        found: dict[str, nn.Module] = {}
        hidden: list[str] = []
        for place, part in self.model.named_modules():
            if any(place.startswith(prefix) for prefix in hidden):
                continue
            found[short[place]] = part
            whole = compiled_call_of_module(part) is not None or is_compiled(vars(part).get("forward"))
            if whole or is_compiled(part):
                hidden.append(f"{place}." if place else "")
        return found

    def parameter_modules(self) -> dict[int, str]:
        """Return `id` of a parameter that the model has now -> path of its module."""
        short, found = short_paths(self.model), dict[int, str]()
        for name, part in self.model.named_modules():
            for p in module_parameters(part).values():
                if p is not None:
                    found.setdefault(id(p), short[name])
        return found

    @contextlib.contextmanager
    def watch_products(self, watch: ProductWatch) -> Iterator[None]:
        """Context manager in which `watch` receives the figures of the model's products in 8 bits (S35)."""
        OPEN_WATCHES.append(watch)
        try:
            with compiled_code_runs_eagerly():
                yield
        finally:
            OPEN_WATCHES.remove(watch)

    def loss_scope(self, readers: Sequence[ModuleReader]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager around one call of `loss_fn`, for all models of it that add losses."""
        return NULL_CONTEXT

    def check_loss(self, loss: torch.Tensor, plan: ResolvedPolicy) -> None:
        """Raise for a loss in a dtype that the model's framework would not have widened (S6): here none."""

    def check_compile(self) -> None:
        """Raise if `train_step(compile=...)` does not take the model."""

    def check_copy(self) -> None:
        """Raise if `pickle` and `copy` lose the connections between a state and its model."""

    def copied(self) -> nn.Module:
        """Return a copy of the model."""
        made: nn.Module = copy.deepcopy(self.model)
        return made

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters, then the running state, in an order that a copy has too."""
        return [*(p for _, p in tree_parameters(self.model)), *(b for _, b in _tree_buffers(self.model))]


def keras_engine_error(engine: str) -> UnsupportedError:
    """Return the error for a parallel engine of torch around Keras layers."""
    return UnsupportedError(
        f"model: Keras layers under {engine}. Keras keeps running statistics as parameters without a gradient, which "
        "the engines of torch leave different on every rank. Use Keras on TensorFlow under tf.distribute, or a model "
        "of torch's own layers."
    )


def _tree_buffers(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return nn.Module.named_buffers(model)
