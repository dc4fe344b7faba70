"""`KerasReader`: what a training state reads of a Keras model on torch. Imported only for one.

It differs from an `nn.Module` in these points:

- The policy is on the layers (`keras_policy_module`), and `training` is an argument of their calls.
- Paths are those of Keras models on every backend: layer names, as in checkpoints of Keras on TensorFlow.
- There are no buffers: running statistics and the states of seed generators are parameters without a gradient. The
  former are running state (S12), and the latter random streams.
- The losses that layers add are there for `polyamp.losses.regularization` (S25).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from polyamp.errors import StateError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules.parameter_kinds import ParameterLeaf
from polyamp_keras.models.copies import copy_model
from polyamp_keras.models.layers import StructureSnapshot, layer_path_aliases, list_layers, require_built
from polyamp_keras.models.variables import model_variables, parameter_leaves
from polyamp_keras.precision.float8_products import product_watch
from polyamp_keras.precision.output_casts import check_loss_dtype
from polyamp_keras.precision.regularization_losses import warn_missing_regularization
from polyamp_torch.precision.torch_only.float8_watch import ProductWatch
from polyamp_torch.precision.torch_only.keras_layers import is_keras_optimizer
from polyamp_torch.precision.torch_only.keras_policy_module import KerasPolicyModule, resolve_policy
from polyamp_torch.step.torch_only.buffers import BufferOwner, BufferOwners
from polyamp_torch.step.torch_only.model_readers import ModuleReader, Parameters, keras_engine_error


class KerasReader(ModuleReader):
    """Reader of a Keras model or layer.

    Args:
        model: the model.

    Attributes:
        warned_of_additions: whether the warning was given that `loss_fn` omits the model's own losses (S25).

    Raises:
        ModelError: the model is not built.
    """

    adds_losses = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        require_built(model, "polyamp.init on torch")
        self.warned_of_additions = False
        self._structure = StructureSnapshot(model)
        self._variables = model_variables(model)

    def check(self, recipe: Recipe, engine: str | None) -> None:
        """Raise for a parallel engine, or a Keras optimizer.

        Raises:
            UnsupportedError: names what to use instead.
        """
        if engine is not None:
            raise keras_engine_error(engine)
        if is_keras_optimizer(recipe.optimizer):
            raise UnsupportedError(
                "optimizer: on torch a step runs polyamp's specs and the optimizers of torch. Received: "
                f"keras.optimizers.{type(recipe.optimizer).__name__}. Write polyamp.adamw(...) and the like, give "
                "torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), or train by fit or a loop of "
                "your own with polyamp_keras.LossScaleOptimizer."
            )

    def check_listing(self, recipe: Recipe, trained: Parameters) -> None:
        """Do nothing: Keras's own listing is what is trained."""

    def parameters(self) -> Parameters:
        """Return the trainable parameters, then the frozen ones, by path."""
        return {**_values(self._variables.parameters), **_values(self._variables.frozen)}

    def trained(self) -> Parameters:
        """Return the trainable parameters by path, in the order of `model.trainable_variables`."""
        return _values(self._variables.parameters)

    def frozen(self) -> Parameters:
        """Return the weights of layers with `trainable=False`, by path."""
        return _values(self._variables.frozen)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the running statistics by path."""
        return {**_values(self._variables.running)}

    def buffer_owners(self) -> BufferOwners:
        """Return the running statistics as the buffers of one owner. Keras writes to them in place."""
        slots: dict[str, Any] = {**_values(self._variables.running)}
        return BufferOwners([BufferOwner("", slots, set())])

    def random_streams(self) -> dict[str, torch.Tensor]:
        """Return the states of seed generators, and other state that is not floating, by path."""
        return {**_values(self._variables.rng)}

    def leaves(self, trained: Parameters) -> Sequence[ParameterLeaf]:
        """Return what parameter groups match (S27)."""
        return parameter_leaves(self.model, self._variables.parameters)

    def module_paths(self) -> Iterable[str]:
        """Return the paths of the layers, which aliases may name."""
        return itertools.chain.from_iterable(layer_path_aliases(list_layers(self.model)).values())

    def plan(self, policy: Policy) -> ResolvedPolicy:
        """Return the policy, resolved for the layers.

        Raises:
            PolicyError, UnsupportedError: Keras cannot follow it.
        """
        return resolve_policy(self.model, policy)

    def bind(self, plan: ResolvedPolicy, device: torch.device) -> KerasPolicyModule:
        """Return the model as `loss_fn` sees it."""
        return KerasPolicyModule(self.model, plan, self._variables.parameters)

    def slots(self) -> list[dict[str, Any]]:
        """Return an empty list: `changed` compares the layers."""
        return []

    def changed(self) -> str | None:
        """Return the first layer that has other layers or weights than at `init`, the start of a sentence; or None."""
        return self._structure.changed()

    def output_modules(self) -> dict[str, Any]:
        """Return path -> layer of every layer."""
        return {entry.stable_path: entry.layer for entry in list_layers(self.model)}

    def parameter_modules(self) -> dict[int, str]:
        """Return `id` of a parameter -> path of its layer."""
        return {id(p): path.rpartition("/")[0] for path, p in self.trained().items()}

    @contextlib.contextmanager
    def watch_products(self, watch: ProductWatch) -> Iterator[None]:
        """Context manager in which `watch` receives the figures of the layers' products in 8 bits (S35)."""
        tokens: list[Any] = []

        def begin(path: str, *_: Any) -> None:
            sink = functools.partial(watch.add, path)
            tokens.append(product_watch.set(lambda x, w: sink))

        def end(*_: Any) -> None:
            product_watch.reset(tokens.pop())

        with contextlib.ExitStack() as hooks:
            for entry in list_layers(self.model):
                before = entry.layer.register_forward_pre_hook(functools.partial(begin, entry.stable_path))
                hooks.callback(before.remove)
                hooks.callback(entry.layer.register_forward_hook(end, always_call=True).remove)
            yield

    def loss_scope(self, readers: Sequence[ModuleReader]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager around one call of `loss_fn` that warns if it omits losses of a model (S25)."""
        return warn_missing_regularization(readers)

    def check_loss(self, loss: torch.Tensor, plan: ResolvedPolicy) -> None:
        """Raise for a loss in 16 bits, though the model's output is wider (S6)."""
        check_loss_dtype(loss, [plan])

    def check_compile(self) -> None:
        """Raise: `torch.compile` does not trace Keras's layers.

        Raises:
            UnsupportedError: names what to write instead.
        """
        raise UnsupportedError(
            "train_step(compile=True): torch's compiler does not trace the layers of Keras, which keep their state in "
            "Python. Received: a Keras model on torch. Use compile=False, Keras on JAX or TensorFlow, whose steps are "
            "compiled, or a model of torch's own layers."
        )

    def check_copy(self) -> None:
        """Raise: Keras copies a model through a file, whose variables are others than those of the state's copy.

        Raises:
            StateError: names what to use instead.
        """
        raise StateError(
            "a state of a Keras model on torch cannot be pickled or copied. To keep it: polyamp.save(state, path), and "
            "polyamp.restore(state, path) into what polyamp.init gives. Weights alone: model.save(path)."
        )

    def copied(self) -> Any:
        """Return a copy of the model."""
        copied = copy_model(self.model)
        with torch.no_grad():
            for place, twin in zip(self.tensors(), KerasReader(copied).tensors(), strict=True):
                twin.copy_(place)
        return copied

    def tensors(self) -> list[torch.Tensor]:
        """Return every variable by role, in an order that a copy has too."""
        return [variable.value for role in self._variables[:4] for variable in role.values()]


def _values(variables: Mapping[str, Any]) -> Parameters:
    return {name: variable.value for name, variable in variables.items()}
