"""The choice of an adapter: which library a model is of. Called by `bound` and `backend`.

A library's adapter lives in a file of its own, which imports that library; it is loaded only if the user's program has
imported the library already.
"""

from __future__ import annotations

from typing import Any, Final

from polyamp.errors import ModelError, UnsupportedError
from polyamp_jax import compat
from polyamp_jax.models.function import FunctionAdapter
from polyamp_jax.models.parts import Opaque, Parts, Running

ACCEPTED: Final = (
    "an nnx.Module, an equinox module, (equinox module, eqx.nn.State), (linen_module, variables), "
    "(hk.Transformed, params), (hk.TransformedWithState, (params, state)) or (apply_fn, params)"
)


def is_model(target: Any) -> bool:
    """True for what `adapt` takes, or refuses with advice; False for a plain function."""
    return isinstance(target, tuple) or any(compat.is_a(target, *kind) for kind in _MODULES)


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
    if compat.is_a(first, "equinox", "Module"):
        from polyamp_jax.models.equinox import adapt_equinox

        return adapt_equinox(model, axis_name)
    if axis_name is not None:
        raise UnsupportedError(
            "axis_name= maps an equinox module over the batch; other libraries' models take whole batches. "
            f"Received: axis_name={axis_name!r} with {_kind(first)}."
        )
    if compat.is_a(first, "flax.nnx", "Module") and first is model:
        from polyamp_jax.models.flax import adapt_nnx

        return adapt_nnx(model)
    if compat.is_a(first, "flax.linen", "Module"):
        from polyamp_jax.models.flax import adapt_linen

        return adapt_linen(*_pair(model, "(linen_module, variables): variables is what module.init(...) returned"))
    if any(compat.is_a(x, "haiku", name) for x in (first, model) for name in _TRANSFORMED):
        from polyamp_jax.models.haiku import adapt_haiku

        return adapt_haiku(model)
    if isinstance(model, tuple) and len(model) == 2 and callable(first):
        return Parts(FunctionAdapter(Opaque(first)), model[1], Running((), ()))
    raise ModelError(f"model must be {ACCEPTED}. Received: {_kind(model)}.")


def _pair(model: Any, form: str) -> Any:
    if not isinstance(model, tuple) or len(model) != 2:
        raise ModelError(f"pass the model as {form}. Received: {_kind(model)}.")
    return model


def _kind(value: Any) -> str:
    if type(value) is tuple:
        return f"({', '.join(_kind(item) for item in value)})"
    return f"{type(value).__module__}.{type(value).__qualname__}"


_TRANSFORMED: Final = ("Transformed", "TransformedWithState", "MultiTransformed", "MultiTransformedWithState")
_MODULES: Final = (
    ("equinox", "Module"),
    ("flax.nnx", "Module"),
    ("flax.linen", "Module"),
    *(("haiku", name) for name in _TRANSFORMED),
)
