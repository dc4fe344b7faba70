"""Registration table of the JAX libraries whose models are accepted, and the lookup of a model's library.

The code of a library is in the file of its name in `models/adapters`, `porting/libraries` and
`observe/library_observers`. Such a file imports the library. It is loaded only if the user's program has imported the
library, so that polyamp itself imports none.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

from polyamp.errors import ModelError, UnsupportedError, describe_value
from polyamp_jax import compat
from polyamp_jax.models.adapter import ModelParts, describe_kind

ACCEPTED_MODELS: Final = (
    "an nnx.Module, a built keras.Model, an equinox module, (equinox module, eqx.nn.State), (linen_module, variables), "
    "(hk.Transformed, params), (hk.TransformedWithState, (params, state)) or (apply_fn, params)"
)


class Library(NamedTuple):
    """A JAX library whose models are accepted.

    Attributes:
        name: name of its file in each folder.
        module: the module that defines its model classes.
        classes: names of the classes of a model, or of the first item of a model's tuple.
        maps_examples: whether `axis_name=` maps its models over the batch.
        applies_policy: whether its own layers follow the policy (`ModelAdapter.applies_policy`).
    """

    name: str
    module: str
    classes: tuple[str, ...]
    maps_examples: bool = False
    applies_policy: bool = False

    @property
    def package(self) -> str:
        """Name of the package that holds `module`."""
        return self.module.partition(".")[0]

    def file_in(self, folder: str) -> Any:
        """Return the library's file in a folder, such as "models.adapters"."""
        return importlib.import_module(f"polyamp_jax.{folder}.{self.name}")

    def has_class_of(self, value: Any) -> bool:
        """Return whether a value is an instance of a model class. False if the program has not imported the library."""
        return any(compat.is_a(value, self.module, name) for name in self.classes)


FUNCTIONS: Final = Library("function", "", ())
"""Plain functions with their parameters: pairs of a callable and a pytree."""

LIBRARIES: Final = (
    Library("keras", "keras", ("Layer",), applies_policy=True),  # before nnx, whose modules nnx-enabled layers are
    Library("equinox", "equinox", ("Module",), maps_examples=True),
    Library("nnx", "flax.nnx", ("Module",)),
    Library("linen", "flax.linen", ("Module",)),
    Library("haiku", "haiku", ("Transformed", "TransformedWithState", "MultiTransformed", "MultiTransformedWithState")),
)


def library_of(model: Any) -> Library | None:
    """Return the library of a model, or of half of one such as a linen module without its variables; None for others.

    >>> library_of((lambda params, x: x, {})).name
    'function'
    """
    first = model[0] if isinstance(model, tuple) and model else model
    for library in LIBRARIES:
        if library.has_class_of(first) or library.has_class_of(model):  # hk.Transformed is a tuple itself
            return library
    is_pair = isinstance(model, tuple) and len(model) == 2 and callable(first)
    return FUNCTIONS if is_pair else None


def require_library(model: Any) -> Library:
    """Return the library of a model.

    Raises:
        ModelError: the object is no model, or only a part of one.
    """
    library = library_of(model)
    if library is None:
        raise ModelError(f"model must be {ACCEPTED_MODELS}. Received: {describe_value(model)}.")
    return library


def is_model(target: Any) -> bool:
    """Return True for objects that `adapt` accepts or rejects with advice, and False for a plain function."""
    return isinstance(target, tuple) or library_of(target) is not None


def adapt(model: Any, *, axis_name: str | None = None) -> ModelParts:
    """Return a model's adapter, parameters and running state, by reference.

    Args:
        model: see `ACCEPTED_MODELS`.
        axis_name: for equinox: map the module over axis 0 of its positional arguments, under this name.

    Raises:
        ModelError: not a model, or only half of one.
        UnsupportedError: `axis_name` for another library.
    """
    library = library_of(model)
    if axis_name is not None and (library is None or not library.maps_examples):
        first = model[0] if isinstance(model, tuple) and model else model
        raise UnsupportedError(
            "axis_name= maps an equinox module over the batch; other libraries' models take whole batches. "
            f"Received: axis_name={axis_name!r} with {describe_kind(first)}."
        )
    if library is None:
        raise ModelError(f"model must be {ACCEPTED_MODELS}. Received: {describe_kind(model)}.")
    options = {} if axis_name is None else {"axis_name": axis_name}
    parts: ModelParts = library.file_in("models.adapters").split_model(model, **options)
    return parts
