"""Adapters for equinox modules, with or without `eqx.nn.State`. Loaded by `models.adapt`."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import equinox as eqx
import jax

from polyamp.errors import ModelError
from polyamp_jax.arrays import path_name
from polyamp_jax.casting import set_class
from polyamp_jax.models import Casts, Keys, Opaque, Parts, Running


@dataclasses.dataclass(frozen=True)
class EquinoxAdapter:
    """An equinox module: inexact arrays are trained, other arrays and the `State` run with the step.

    Without `axis_name` the bound model is called as the module itself is, less its state. With it, positional
    arguments are mapped over axis 0 (equinox modules take one example), every example has a random key of its own,
    and the `State` is shared.
    """

    static: Opaque
    stateful: bool
    axis_name: str | None
    pinned: frozenset[str]
    modules: tuple[tuple[str, Any], ...]
    stream: str | None = "key"

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        buffers, state = running.statistics
        module = self._cast(eqx.combine(params, buffers, self.static.value), casts)
        state = jax.tree.map(lambda leaf: leaf, state)  # a State dies when it is used; the copy dies in its place
        keys = {name: key for name, key in keys.items() if name not in kwargs}

        def one(args: Any, keys: Any) -> tuple[Any, Any]:
            if not self.stateful:
                return module(*args, **keys, **kwargs), None
            output, changed = module(*args, state, **keys, **kwargs)
            return output, changed

        if self.axis_name is not None:
            size = jax.tree.leaves(args)[0].shape[0]
            keys = {name: jax.random.split(key, size) for name, key in keys.items()}
            one = jax.vmap(one, in_axes=(0, 0), out_axes=(0, None), axis_name=self.axis_name)
        output, changed = one(args, keys)
        return output, running._replace(statistics=(buffers, changed))

    def join(self, params: Any, running: Running) -> Any:
        buffers, state = running.statistics
        module = eqx.combine(params, buffers, self.static.value)
        return (module, jax.tree.map(lambda leaf: leaf, state)) if self.stateful else module

    def write_back(self, model: Any, running: Running) -> None:
        """Nothing: equinox modules are immutable."""

    def check_streams(self, names: Collection[str]) -> None:
        """Every stream is a keyword argument, so any name will do."""

    def _cast(self, module: Any, casts: Casts) -> Any:
        """The module with those inside it that have a dtype of their own replaced by casting copies."""
        policy = casts.policy
        for path, keys in self.modules:
            pinned = path in self.pinned and policy.dtype_at(path) is None and policy.compute != policy.param
            if not pinned and path not in casts.dtypes:
                continue
            inner = copy.copy(_at(module, keys))
            if pinned:
                set_class(inner, path, casts, inputs=policy.param, outputs=policy.compute)
            else:
                set_class(inner, path, casts)
            module = inner if not keys else eqx.tree_at(functools.partial(_at, keys=keys), module, inner)
        return module


def adapt_equinox(model: Any, axis_name: str | None) -> Parts:
    """The parts of an equinox module, or of `(module, eqx.nn.State)`."""
    module, state = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if not isinstance(module, eqx.Module) or (state is not None and not isinstance(state, eqx.nn.State)):
        raise ModelError(
            "pass an equinox model as the module, or as (module, state) with the eqx.nn.State that "
            f"eqx.nn.make_with_state(...) returned. Received: {model!r}."
        )
    params, rest = eqx.partition(module, eqx.is_inexact_array)
    buffers, static = eqx.partition(rest, eqx.is_array)
    modules = _modules(module)
    # equinox's BatchNorm selects between its statistics (float32) and its input's, which must agree in dtype
    pinned = frozenset(path for path, keys in modules if _keeps_state(_at(module, keys)))
    adapter = EquinoxAdapter(Opaque(static), state is not None, axis_name, pinned, modules)
    return Parts(adapter, params, Running((buffers, state), ()))


def _modules(module: Any) -> tuple[tuple[str, Any], ...]:
    """(path, keys) of every module that directly owns an array or a state, inner ones first."""
    found: dict[tuple[Any, ...], str] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(module, is_leaf=_is_index):
        if eqx.is_inexact_array(leaf) or _is_index(leaf):
            owner = keys[:-1]
            while not isinstance(_at(module, owner), eqx.Module):
                owner = owner[:-1]
            found[owner] = path_name(owner)
    return tuple((found[keys], keys) for keys in sorted(found, key=len, reverse=True))


def _keeps_state(module: Any) -> bool:
    return any(_is_index(value) for value in vars(module).values())


def _is_index(value: Any) -> bool:
    return isinstance(value, eqx.nn.StateIndex)


def _at(tree: Any, keys: Any) -> Any:
    for key in keys:
        tree = getattr(tree, key.name) if isinstance(key, jax.tree_util.GetAttrKey) else tree[_index(key)]
    return tree


def _index(key: Any) -> Any:
    return key.key if isinstance(key, jax.tree_util.DictKey) else key.idx
