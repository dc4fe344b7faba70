"""Base class of the adapters, which call a model and rebuild it from its parts; the modules, parameters and random
streams of a model through its adapter.

Each library's adapter is in its file in `adapters`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules.parameter_kinds import ParameterLeaf, class_names
from polyamp_jax import compat
from polyamp_jax.arrays import is_array, is_key, path_name
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.model_pass import ModelPass
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.models.running_state import ModelInputs, RunningState


class ModelAdapter(abc.ABC):
    """Adapter that calls the models of one library. Static and hashable, without arrays.

    This class has the defaults: models without module objects or states of their own.

    Attributes:
        stream: name of the random stream if `rngs` is a bare seed or key; None if the streams must be named.
        module: module class or classes of the library; empty if its models have no modules.
        is_mutable: whether the library's models change in place.
        applies_policy: whether the library's own layers follow the policy, so that no interpreter runs the model and
            its parameters are not cast.
        pinned: paths of modules that the library can run only in the dtype of their master parameters.
    """

    stream: ClassVar[str | None] = None
    module: ClassVar[type | tuple[type, ...]] = ()
    is_mutable: ClassVar[bool] = False
    applies_policy: ClassVar[bool] = False
    pinned: frozenset[str] = frozenset()

    @abc.abstractmethod
    def call(self, inputs: ModelInputs, casts: CallCasts, route: ModulePath) -> tuple[Any, RunningState]:
        """Call the model or the part at `route`, and return its output and the changed running state.

        `written` contains the parameters that the call wrote, in the dtypes of `inputs.params`.
        """

    def draws(self, route: ModulePath, view: Any, names: Collection[str], args: Any, kwargs: Any) -> bool:
        """Return whether a call of the part at `route` of `view` would use the keys of the streams `names`."""
        return True

    def start(self, params: Any, masters: Any, running: RunningState, model: Any = None) -> ModelPass:
        """Return the model's state for a pass, at its beginning.

        Args:
            params: the parameters that the model computes with.
            masters: the master weights, which may be the same object.
            running: the running state.
            model: for a mutable model, the user's own model if the pass is to change it.
        """
        return ModelPass(self, params, masters, running)

    def resolve_policy(self, policy: Policy, params: Any, running: RunningState) -> ResolvedPolicy:
        """Return a policy resolved for the model. Raises `PolicyError`: an override matches no module."""
        return policy.plan(module_paths(ModelParts(self, params, running)), backend="jax")

    @classmethod
    def forward_scope(cls, engines: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context manager around a call of `loss_fn` with models of this library, one per engine."""
        return contextlib.nullcontext()

    def view(self, params: Any, running: RunningState) -> Any:
        """Return the object that attributes are read from, with the given parameters and running state."""
        return self.join(params, running)

    def bind(self, engine: Any) -> Any:
        """Return the model for `loss_fn` if it is a module of the library, else None."""
        return None

    def params_of(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        """Return the parameters of `part`, the view's module at `route`, selected from all parameters."""
        return params

    def state_of(self, running: RunningState) -> Any:
        """Return the model's state as the library defines it, or None if the library has no such state."""
        return None

    def tree(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        """Return the parameters of `part` as the pytree that the library's own functions traverse."""
        return self.params_of(part, route, params, running)

    def modules(self, params: Any, running: RunningState) -> Mapping[str, Any]:
        """Return the model's module objects by path; empty if they exist in calls only."""
        return {}

    def parameter_paths(self, modules: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Return path -> all paths of parameters that several of the `modules` may own."""
        return {}

    @abc.abstractmethod
    def join(self, params: Any, running: RunningState) -> Any:
        """Return the model in its native form."""

    def exchange(self, params: Any, running: RunningState) -> AbstractContextManager[Any]:
        """Return a context manager that yields the model with other values; a model of the user's has its own again
        when it ends."""
        return contextlib.nullcontext(self.join(params, running))

    def copy(self, params: Any, running: RunningState) -> Any:
        """Return a model of its own with the values. Raises `UnsupportedError`: the model cannot be copied."""
        return self.join(params, running)

    def check_unchanged(self) -> None:
        """Raise if a model of the user's has changed in a way that a compiled step would not notice."""
        return  # the adapter has no model: it is part of the state

    def regularization(self, part: Any) -> Any:
        """Return the sum of the losses that the model, or a part of it, adds (S25), float32 scalar."""
        return jnp.zeros((), jnp.float32)

    def find_stream_problem(self, names: Collection[str]) -> str | None:
        """Return why the library cannot use random streams of these names, or None."""
        return None


def check_streams(adapter: ModelAdapter, names: Collection[str]) -> None:
    """Reject random streams that the library cannot use. Raises `UnsupportedError`."""
    problem = adapter.find_stream_problem(names)
    if problem is not None:
        raise UnsupportedError(problem)


class ModelParts(NamedTuple):
    """Adapter, parameters and running state of a model."""

    adapter: ModelAdapter
    params: Any
    running: RunningState


class OpaqueValue:
    """Static value that compares by equality if it is hashable, and by identity otherwise."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash: int | None = hash(value)
        except TypeError:
            self._hash = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpaqueValue):
            return NotImplemented
        if self.value is other.value:
            return True
        return self._hash is not None and self._hash == other._hash and bool(self.value == other.value)

    def __hash__(self) -> int:
        return id(self.value) if self._hash is None else self._hash


def module_paths(parts: ModelParts) -> frozenset[str]:
    """Return the path of every module of a model, including all parent paths and the root path ""."""
    owners = [*parameter_owners(parts.params), *parts.adapter.modules(parts.params, parts.running)]
    segments = [path.split("/") for path in owners]
    return frozenset({"", *("/".join(some[: n + 1]) for some in segments for n in range(len(some)))})


def parameter_owners(params: Any) -> list[str]:
    """Return the paths of the modules that own parameters."""
    return [path_name(keys).rpartition("/")[0] for keys, _ in jax.tree_util.tree_leaves_with_path(params)]


def describe_kind(value: Any) -> str:
    """Return the class of a value by its full name; of a tuple the classes of its items."""
    if type(value) is tuple:
        return f"({', '.join(describe_kind(item) for item in value)})"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def random_keys(rngs: Any, adapter: ModelAdapter) -> dict[str, jax.Array]:
    """Return the base keys of a model's random streams, derived from `rngs`.

    Args:
        rngs: None, a mapping from stream name to seed or key, an `nnx.Rngs`, or a bare seed or key if the adapter has
            a default stream name.

    Raises:
        UnsupportedError: something else.
    """
    if rngs is None:
        return {}
    if compat.is_a(rngs, "flax.nnx", "Rngs"):  # the next keys of its streams; `rngs` is not changed
        rngs = {name: jax.random.fold_in(stream.key[...], stream.count[...]) for name, stream in rngs.items()}
    if not isinstance(rngs, Mapping):
        if adapter.stream is None:
            raise UnsupportedError(
                f"rngs must map stream names to seeds or keys, such as rngs={{'dropout': 0}}. Received: rngs={rngs!r}."
            )
        rngs = {adapter.stream: rngs}
    check_streams(adapter, rngs)
    return {str(name): _random_key(name, seed) for name, seed in rngs.items()}


def _random_key(name: Any, seed: Any) -> jax.Array:
    if isinstance(seed, int) and not isinstance(seed, bool):
        return jax.random.key(seed)
    if is_key(seed) and seed.shape == ():
        return seed  # type: ignore[no-any-return]  # is_key says that it is a jax.Array
    if is_array(seed) and str(seed.dtype) == "uint32" and seed.ndim == 1:
        return jnp.asarray(seed)
    raise UnsupportedError(f"rngs[{name!r}] must be an integer seed or one PRNG key. Received: {seed!r}.")


def parameter_leaves(parts: ModelParts) -> list[ParameterLeaf]:
    """Return every parameter, in the order of the leaves, with the class of its owning module if there is one.

    A shared nnx variable has the classes of all modules that own it.
    """
    modules = parts.adapter.modules(parts.params, parts.running)
    shared = parts.adapter.parameter_paths(modules)
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(parts.params):
        path = path_name(keys)
        paths = shared.get(path, (path,))
        owners = [modules[owner] for each in paths if (owner := each.rpartition("/")[0]) in modules]
        names = tuple(name for owner in owners for name in class_names(owner))
        outputs_first = path.rpartition("/")[2] == "weight"  # equinox's, as in torch; flax, haiku: kernel, w
        found.append(ParameterLeaf(path, jnp.ndim(leaf), names if owners else None, paths, outputs_first))
    return found
