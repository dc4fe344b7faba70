"""Protocols of a backend's converters, `Converter`, `FileConverter` and `HasConverter`, and `Evaluation`.

`backends/*/porting` implement them; `polyamp.reference.converter` is the shortest example.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Array, Lazy


class Evaluation(NamedTuple):
    """Result of one forward and backward pass in float32 and inference mode (no dropout, running statistics used).

    Attributes:
        outputs: the model's outputs as a flattened tree in a fixed order (dicts by key), in the framework's layout.
        gradients: name of a trainable leaf -> gradient of the sum of outputs times cotangents, in the leaf's shape.
        modules: path of a module -> its output, if that is one array; in the order in which calls ended.
        inputs: path of a module -> the first array that its first call took, for the modules that were asked for.
    """

    outputs: Sequence[Array]
    gradients: Mapping[str, Array]
    modules: Mapping[str, Array]
    inputs: Mapping[str, Array] = {}


class Converter(Protocol):
    """Operations that `polyamp.port` requires of a framework."""

    @property
    def in_place(self) -> bool:
        """Whether `fill` returns the model itself, with new values in it."""

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        """Return every array of a model, in layers. Changes nothing, and reads no values.

        Args:
            model: as `polyamp.init` accepts it; in JAX its arrays may be `jax.ShapeDtypeStruct`.
            batch: inputs for a call, if that shows more than the arrays (linen, haiku). The call traces only shapes
                if the framework supports it.

        Raises:
            ModelError: not a model, or a model without variables yet.
        """

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Any:
        """Fill the leaves of these names with new values, which already have their shapes and dtypes.

        Either all leaves are filled or none. Arrays that may fail to read are read before the first write, or written
        values are restored. Arrays are read one at a time.

        Returns:
            The model itself if it is filled in place; in JAX a new model of the same structure and sharding.
        """

    def evaluate(
        self,
        model: Any,
        batch: Any,
        cotangents: Callable[[Sequence[Array]], Sequence[Array]],
        inputs: Container[str] = (),
    ) -> Evaluation:
        """Return outputs, gradients and the outputs of modules on a batch. The model stays unchanged.

        Args:
            model: the model.
            batch: an array, a tuple of positional arguments or a mapping of keyword arguments, NumPy.
            cotangents: function from the outputs to the cotangents of the gradient, in the outputs' shapes.
            inputs: paths of modules whose inputs are returned too, if their calls can be observed.
        """


@runtime_checkable
class FileConverter(Protocol):
    """Converter that also reads and writes its framework's model files. It gets files with its framework's suffix or
    first bytes (torch: .pt, .pth, .bin, and safetensors with torch's names; TensorFlow: .keras, .weights.h5; JAX:
    folders of orbax, and safetensors with flax's names)."""

    def open_file(self, path: Path) -> Inventory:
        """Return the layers of a file, as `inventory` does for a model. Avoids reading values, and runs no code from
        the file.

        Raises:
            PortError: the file is damaged, or contains no model of this framework.
            FileNotFoundError: there is no such file.
        """

    def write_file(self, path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
        """Write a file with the layout of another one, atomically, one array at a time.

        Args:
            path: the file to be written; it may be `like` itself.
            leaves: name of each leaf that `open_file(like)` lists -> its values, in that leaf's shape. Their dtypes
                may differ; the new file has them.
            like: an existing file of the target model. Its content other than the leaves is kept.

        Raises:
            PortError: the values do not fit.
            OSError: the file cannot be written; an older file is unchanged.
        """

    def write_model(self, path: Path, model: Any) -> None:
        """Write a model to a file in its framework's format for the path's suffix, atomically.

        Raises:
            PortError: the framework has no file format with that suffix.
            OSError: the file cannot be written; an older file is unchanged.
        """


@runtime_checkable
class HasConverter(Protocol):
    """Backend whose models can be moved to and from other frameworks."""

    @property
    def porting(self) -> Converter:
        """Converter of the backend."""
