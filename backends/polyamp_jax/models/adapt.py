"""Adapters: how each JAX library's models are taken apart, called and put together again.

`adapt` recognises a model and returns its `Parts`. A library's adapter lives in a file of its own, which imports that
library; it is loaded only if the user's program has imported the library already. Called by `bound` and `backend`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import ModelError, PolicyError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp_jax.arrays import cast_arguments, is_array, is_key, path_name

Keys = Mapping[str, Any]
"""Stream name -> PRNG key."""

ACCEPTED: Final = (
    "an nnx.Module, an equinox module, (equinox module, eqx.nn.State), (linen_module, variables), "
    "(hk.Transformed, params), (hk.TransformedWithState, (params, state)) or (apply_fn, params)"
)


class Running(NamedTuple):
    """What a forward pass changes in a model beside its parameters.

    Attributes:
        statistics: running statistics and other buffers; dropped when a step is skipped (S12).
        streams: the random-number state that the model keeps itself (nnx); it moves on at skipped steps too, or a
            dropout mask that overflows would come back for ever.
        draws: passes made since the last update was tried, int32 scalar; the keys given to `init` are folded with it,
            so that every micro-batch and every call of `value_and_grad` has masks of its own (S12).
    """

    statistics: Any
    streams: Any
    draws: Any = np.int32(0)


class Casts:
    """What an adapter does around each module's call: cast its arguments, or name its scope.

    In cast mode every module's floating arguments are cast to its own dtype, so that the layer after a float32 one is
    16-bit again. In autocast mode every module opens a scope named after its path, by which the interpreter knows
    where an operation belongs (S5).

    Attributes:
        policy: the policy.
        dtypes: cast mode: path of a module that owns parameters -> dtype of its floating inputs.
        scoped: whether scopes are opened.
        paths: autocast mode: the paths of the modules that the model has, as far as they are known.
    """

    def __init__(self, policy: Policy, dtypes: Mapping[str, str] | None = None, *, scoped: bool = False) -> None:
        self.policy = policy
        self.dtypes = dtypes or {}
        self.scoped = scoped
        self.paths: set[str] = set()
        self._open = [""]

    @property
    def active(self) -> bool:
        """False where nothing is to be done: then no module is touched."""
        return self.scoped or bool(self.dtypes)

    def expect(self, paths: Iterable[str]) -> None:
        """Note the paths of modules that may be called, and of those around them, before any of them is.

        A module inside a function that JAX has traced already is not called again.
        """
        for path in paths:
            segments = path.split("/") if path else []
            self.paths.update("/".join(segments[: n + 1]) for n in range(len(segments)))

    @contextlib.contextmanager
    def module(self, path: str, args: Any, kwargs: Any, explicit: Any) -> Iterator[tuple[Any, Any]]:
        """Around one call of a module; gives its arguments.

        Args:
            path: the module's path.
            args: positional arguments.
            kwargs: keyword arguments.
            explicit: the dtype that the module itself was built with, or None.

        Raises:
            PolicyError: an override and the module's own dtype contradict each other.
        """
        self.check(path, explicit)
        if not self.scoped:
            dtype = self.dtypes.get(path)
            if dtype is not None:
                args, kwargs = cast_arguments((args, kwargs), dtype, float64=self.policy.casts_float64)
            yield args, kwargs
            return
        with self.scope(path):
            yield args, kwargs

    @contextlib.contextmanager
    def scope(self, path: str) -> Iterator[None]:
        """The scopes that say that what is inside belongs to the module at `path`."""
        outer = self._open[-1]
        self.expect([path])
        if path == outer or not path:
            yield
            return
        # relative to the module that is open, as a path is; absolute where the module belongs elsewhere, or where the
        # scope that the library opens itself (haiku) and this one together would name a module inside
        inside = not outer or path.startswith(f"{outer}/")
        doubled = f"{path}/{path.rpartition('/')[2]}" in self.paths
        self._open.append(path)
        try:
            with contextlib.ExitStack() as scopes:
                segments = path[len(outer) :].strip("/").split("/") if inside and not doubled else [f"/{path}"]
                for segment in segments:
                    scopes.enter_context(jax.named_scope(segment))
                yield
        finally:
            self._open.pop()

    def check(self, path: str, explicit: Any) -> None:
        """Refuse an override that contradicts the dtype that a module was built with. Raises `PolicyError`."""
        override = self.policy.dtype_at(path)
        if explicit is not None and override is not None and jnp.dtype(explicit) != jnp.dtype(override):
            raise PolicyError(
                f"overrides give the module {path!r} the dtype {override}, but it was built with "
                f"dtype={jnp.dtype(explicit)}. Build it with dtype=None, or drop the override."
            )


class Adapter(Protocol):
    """One library's way of calling a model; static, hashable, without arrays."""

    @property
    def stream(self) -> str | None:
        """Name of the random stream when `rngs` is a bare seed or key; None where the streams must be named."""

    @property
    def pinned(self) -> frozenset[str]:
        """Paths of modules that the library lets run only in the dtype of their parameters' masters."""

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        """The model's output and what the call changed."""

    def join(self, params: Any, running: Running) -> Any:
        """The model in its native form."""

    def write_back(self, model: Any, running: Running) -> None:
        """Put what a call changed into the user's own model, where the library's models are mutable."""

    def check_streams(self, names: Collection[str]) -> None:
        """Refuse random streams that the library has no use for. Raises `UnsupportedError`."""


class Parts(NamedTuple):
    """A model taken apart."""

    adapter: Adapter
    params: Any
    running: Running


class Opaque:
    """A static value that compares by equality if it can be hashed and by identity if not."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash: int | None = hash(value)
        except TypeError:
            self._hash = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Opaque):
            return NotImplemented
        if self.value is other.value:
            return True
        return self._hash is not None and self._hash == other._hash and bool(self.value == other.value)

    def __hash__(self) -> int:
        return id(self.value) if self._hash is None else self._hash


@dataclasses.dataclass(frozen=True)
class FunctionAdapter:
    """`(apply_fn, params)`: called as `apply_fn(params, *args, **kwargs)`; each random stream is a keyword argument."""

    apply_fn: Opaque
    stream: str | None = "rng"
    pinned: frozenset[str] = frozenset()

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        return self.apply_fn.value(params, *args, **{**keys, **kwargs}), running

    def join(self, params: Any, running: Running) -> Any:
        return self.apply_fn.value, params

    def write_back(self, model: Any, running: Running) -> None:
        """Nothing: a function holds no arrays."""

    def check_streams(self, names: Collection[str]) -> None:
        """Every stream is a keyword argument, so any name will do."""


def is_model(target: Any) -> bool:
    """True for what `adapt` takes, or refuses with advice; False for a plain function."""
    return isinstance(target, tuple) or any(_isinstance(target, *kind) for kind in _MODULES)


def adapt(model: Any, *, axis_name: str | None = None) -> Parts:
    """A model's adapter, parameters and running state, by reference.

    Args:
        model: see `ACCEPTED`.
        axis_name: for equinox: map the module over axis 0 of its positional arguments, under this name.

    Raises:
        ModelError: not a model, or only half of one.
        UnsupportedError: `axis_name` for another library.
    """
    first = model[0] if isinstance(model, tuple) and model else model
    if _isinstance(first, "equinox", "Module"):
        from polyamp_jax.models.equinox import adapt_equinox

        return adapt_equinox(model, axis_name)
    if axis_name is not None:
        raise UnsupportedError(
            "axis_name= maps an equinox module over the batch; other libraries' models take whole batches. "
            f"Received: axis_name={axis_name!r} with {_kind(first)}."
        )
    if _isinstance(first, "flax.nnx", "Module") and first is model:
        from polyamp_jax.models.flax import adapt_nnx

        return adapt_nnx(model)
    if _isinstance(first, "flax.linen", "Module"):
        from polyamp_jax.models.flax import adapt_linen

        return adapt_linen(*_pair(model, "(linen_module, variables): variables is what module.init(...) returned"))
    if any(_isinstance(x, "haiku", name) for x in (first, model) for name in ("Transformed", "TransformedWithState")):
        from polyamp_jax.models.haiku import adapt_haiku

        return adapt_haiku(model)
    if isinstance(model, tuple) and len(model) == 2 and callable(first):
        return Parts(FunctionAdapter(Opaque(first)), model[1], Running((), ()))
    raise ModelError(f"model must be {ACCEPTED}. Received: {_kind(model)}.")


def owners(params: Any) -> list[str]:
    """Paths of the modules that own parameters."""
    return [path_name(keys).rpartition("/")[0] for keys, _ in jax.tree_util.tree_leaves_with_path(params)]


def random_keys(rngs: Any, adapter: Adapter) -> dict[str, jax.Array]:
    """The base keys of a model's random streams, from what the user gave as `rngs`.

    Args:
        rngs: None, a mapping from stream name to seed or key, an `nnx.Rngs`, or a bare seed or key where the adapter
            names it.

    Raises:
        UnsupportedError: something else.
    """
    if rngs is None:
        return {}
    if _isinstance(rngs, "flax.nnx", "Rngs"):  # the keys that its streams would give next; it stays as it is
        rngs = {name: jax.random.fold_in(stream.key[...], stream.count[...]) for name, stream in rngs.items()}
    if not isinstance(rngs, Mapping):
        if adapter.stream is None:
            raise UnsupportedError(
                f"rngs must map stream names to seeds or keys, such as rngs={{'dropout': 0}}. Received: rngs={rngs!r}."
            )
        rngs = {adapter.stream: rngs}
    adapter.check_streams(rngs)
    return {str(name): _key(name, seed) for name, seed in rngs.items()}


def _key(name: Any, seed: Any) -> jax.Array:
    if isinstance(seed, int) and not isinstance(seed, bool):
        return jax.random.key(seed)
    if is_key(seed) and seed.shape == ():
        return seed  # type: ignore[no-any-return]  # is_key says that it is a jax.Array
    if is_array(seed) and str(seed.dtype) == "uint32" and seed.ndim == 1:
        return jnp.asarray(seed)
    raise UnsupportedError(f"rngs[{name!r}] must be an integer seed or one PRNG key. Received: {seed!r}.")


def _pair(model: Any, form: str) -> Any:
    if not isinstance(model, tuple) or len(model) != 2:
        raise ModelError(f"pass the model as {form}. Received: {_kind(model)}.")
    return model


def _isinstance(value: Any, module: str, name: str) -> bool:
    """`isinstance` against a class of a library that is not imported here."""
    loaded = sys.modules.get(module)
    kind: Callable[..., Any] | None = getattr(loaded, name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _kind(value: Any) -> str:
    if type(value) is tuple:
        return f"({', '.join(_kind(item) for item in value)})"
    return f"{type(value).__module__}.{type(value).__qualname__}"


_MODULES: Final = (
    ("equinox", "Module"),
    ("flax.nnx", "Module"),
    ("flax.linen", "Module"),
    ("haiku", "Transformed"),
    ("haiku", "TransformedWithState"),
)
