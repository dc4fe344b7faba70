"""equinox models in the canonical layout: `Library` (see `library`) over `equinox_walk` and `equinox_layers`.

Loaded by `converter` once the user's program has imported equinox.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp

from polyamp.errors import ModelError, PortError, described
from polyamp.porting.layouts.forms import Form, same
from polyamp.porting.layouts.inventory import Inventory, Leaf, NativeLayer
from polyamp.porting.layouts.register import form_of, qualified
from polyamp_jax import compat
from polyamp_jax.models.equinox import modules_in
from polyamp_jax.porting import places
from polyamp_jax.porting.equinox_layers import lines, row_of
from polyamp_jax.porting.equinox_walk import Part, Walk
from polyamp_jax.porting.library import Batch, Record

_KEPT: Final = 4096
"""Subclasses of modules kept at most: JAX keeps every one that it has seen for ever."""


def inventory(model: Any, batch: Batch | None) -> Inventory:
    """Every array of a module, or of `(module, eqx.nn.State)`, in layers; the batch is not needed."""
    walk = Walk(_checked(model))
    return Inventory([_layer(part) for part in walk.parts], "equinox", left=walk.left)


def arrays(model: Any) -> Mapping[str, Any]:
    """Name of a leaf -> its array."""
    return {name: weight.array for name, weight in Walk(_checked(model)).weights().items()}


def replaced(model: Any, arrays: Mapping[str, Any]) -> Any:
    """A new model with other arrays in the leaves of these names."""
    return places.replaced(model, Walk(_checked(model)).weights(), arrays)


def run(model: Any, batch: Batch, record: Record) -> Any:
    """The outputs on a batch, one sample at a time: the module is mapped over axis 0 of all that it is given.

    A module that maps its batch itself, so that it cannot be called with a sample, is called with the whole.
    """
    module, state = model if isinstance(model, tuple) else (model, None)
    module = eqx.nn.inference_mode(module)
    drawn = _takes_a_key(module)

    def one(module: Any, args: Any, kwargs: Any, key: Any) -> Any:
        keys = {"key": key} if drawn and "key" not in kwargs else {}
        if state is None:
            return module(*args, **keys, **kwargs)
        return module(*args, jax.tree.map(lambda leaf: leaf, state), **keys, **kwargs)[0]

    inputs, key = (batch.args, dict(batch.kwargs)), jax.random.key(0)
    watched = _Watched(module, record)
    if not _mapped(functools.partial(one, module), inputs, key):
        return one(watched, *inputs, key)
    size = jax.tree.leaves(inputs)[0].shape[0]

    def sample(args: Any, kwargs: Any, key: Any, number: Any) -> Any:
        watched.sample = number
        return one(watched, args, kwargs, key)

    return jax.vmap(sample)(*inputs, jax.random.split(key, size), jnp.arange(size))


def _checked(model: Any) -> Any:
    module, state = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if not isinstance(module, eqx.Module) or (state is not None and not isinstance(state, eqx.nn.State)):
        raise ModelError(
            "pass an equinox model as the module, or as (module, state) with the eqx.nn.State that "
            f"eqx.nn.make_with_state(...) returned. Received: {described(model)}."
        )
    return model


def _layer(part: Part) -> NativeLayer:
    leaves = {
        local: Leaf(name := part.name(local), weight.lazy(name), weight.trainable, weight.tied)
        for local, weight in part.weights.items()
    }
    if part.layer is None:
        return NativeLayer(part.path, leaves, part.forms or (Form("parameter", same("value")),))
    form, row, said = form_of(part.layer), row_of(part.layer), {}
    if form is None and row is not None:
        form = row.form(part.layer)
        form = Form(form.kind, form.rules, {**form.attributes, **part.said})
        said = lines(part.layer, part.path, row)
    if form is None:
        raise AssertionError(f"{part.path!r} is no layer")
    module = f"eqx.nn.{type(part.layer).__name__}"
    if not type(part.layer).__module__.startswith("equinox."):
        module = qualified(type(part.layer))
    _check_names(form, leaves, part, module)
    return NativeLayer(part.path, leaves, (form,), module, said)


def _check_names(form: Form, leaves: Iterable[str], part: Part, module: str) -> None:
    named = sorted(name for rule in form.rules for name in rule.native)
    if named != sorted(leaves):
        raise PortError(
            f"the form of {module} at {part.path!r} names the arrays {named}, and the layer has {sorted(leaves)}: a "
            "form names every array of its layer once."
        )


def _takes_a_key(module: Any) -> bool:
    """Whether it must be given a random key: one that it can do without is left out."""
    parameters = inspect.signature(module).parameters
    return "key" in parameters and parameters["key"].default is inspect.Parameter.empty


def _mapped(one: Callable[..., Any], inputs: Any, key: Any) -> bool:
    """Whether the module takes one sample."""

    def sample(array: Any) -> Any:
        struct: Any = jax.ShapeDtypeStruct
        return struct(jnp.shape(array)[1:], jnp.result_type(array))

    if any(jnp.ndim(array) == 0 for array in jax.tree.leaves(inputs)):
        return False
    try:
        jax.eval_shape(one, *jax.tree.map(sample, inputs), key)
    except Exception as error:  # noqa: BLE001  # whatever the user's module says of a sample
        try:
            jax.eval_shape(one, *inputs, key)
        except Exception:  # noqa: BLE001  # it takes neither; what it says of a sample is what its users expect
            raise error from None
        return False
    return True


class _Watched:
    """A copy of a module whose modules report what they return.

    Attributes:
        module: the copy.
        sample: inside of `jax.vmap`, the number of the sample.
    """

    def __init__(self, module: Any, record: Record) -> None:
        self._record, self._outermost = record, compat.trace_state()
        self.sample: Any = jnp.int32(0)
        leaves, structure = jax.tree.flatten(module)
        self.module = jax.tree.unflatten(structure, leaves)
        for path, node in modules_in(self.module):
            kind: Any = type(node)
            if path and callable(node):
                object.__setattr__(node, "__class__", _reporting(kind, path))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _watching.set(self)
        try:
            return self.module(*args, **kwargs)
        finally:
            _watching.reset(token)

    def report(self, path: str, output: Any, sample: Any) -> None:
        """Record an output, which `jax.vmap` may have made one of many; of as many as `sample` is."""
        if not isinstance(output, jax.Array):
            return
        if compat.trace_state() == self._outermost:
            self._record(path, output)
            return

        # on the way out of each `jax.vmap` the function below is asked what it makes of all samples at once
        @jax.custom_batching.custom_vmap
        def out(value: Any, sample: Any) -> Any:
            return value

        @out.def_vmap
        def _(size: int, mapped: Any, value: Any, sample: Any) -> Any:
            self.report(path, value, sample)
            return value, mapped[0]

        out(jax.lax.stop_gradient(output), sample)


_watching: ContextVar[_Watched | None] = ContextVar("polyamp_watching", default=None)


@functools.lru_cache(maxsize=_KEPT)
def _reporting(kind: Any, path: str) -> type:
    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)
        with_state = isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], eqx.nn.State)
        watching = _watching.get()
        if watching is not None:
            watching.report(path, output[0] if with_state else output, watching.sample)
        return output

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made
