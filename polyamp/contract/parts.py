"""What `save` and `restore` ask of a backend whose states lie in several processes: `LiesInParts` and `Parts`.

`Meets` and `HasCopies` are what its `Processes` may offer beyond that.

A backend that never trains in several processes needs none of it: `polyamp.train.parts.Alone` is one process that holds
everything, and gives every backend the folder form (S33).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Form(NamedTuple):
    """What an array is like, without its values.

    Attributes:
        dtype: name of its dtype, as NumPy and ml_dtypes have it ("float32", "bfloat16").
        shape: of the whole array, however it is divided.
    """

    dtype: str
    shape: tuple[int, ...]


class Processes(Protocol):
    """The processes that hold a state together."""

    @property
    def rank(self) -> int:
        """Which of them this one is, from 0."""

    @property
    def count(self) -> int:
        """How many there are."""

    def gather(self, said: bytes) -> list[bytes]:
        """What each of them says, by rank; every process calls it, and lengths may differ.

        Raises:
            ReplicaError: one of them ended, or was not heard in time.
        """


@runtime_checkable
class Meets(Protocol):
    """`Processes` that can wait for each other before anything is sent."""

    def call_of_all(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block that is entered once every process has come to it.

        Args:
            what: the call, as users write it: "polyamp.save".

        Raises:
            ReplicaError: names a process that did not come, or that ended within the block.
        """


@runtime_checkable
class HasCopies(Protocol):
    """`Processes` of a state that each of them holds whole, so that any of them may save it alone (S33)."""

    def write_by_one(self, path: str, put: Callable[[], None], look: Callable[[], Any]) -> None:
        """Have one file written by one of the processes that call this, without knowing which do.

        See `polyamp.rules.single_writer.SingleWriter.write`.
        """


class Parts(Protocol):
    """A state as its processes hold it, between two steps; what is written and read here is divided among them.

    `import_state` of the backend takes what `read` gives, and whole NumPy arrays as well, of which each process takes
    its part.
    """

    @property
    def processes(self) -> Processes:
        """Who takes part."""

    @property
    def replica(self) -> tuple[int, int]:
        """(rank, count) for random streams: processes that share one have to draw the same."""

    @property
    def arrays(self) -> Mapping[str, Array | Form]:
        """Every array of the state by the names of `export_state`, but for `own`. Arrays of numbers that steer (0-dim
        ones, and what `setting_of` knows) as they are, of the others the form is enough."""

    @property
    def own(self) -> Mapping[str, Array]:
        """Arrays of which each process has its own, of one form everywhere: random-number streams."""

    def whole(self) -> dict[str, Array]:
        """`export_state`, of this process's `own`. Every process calls it."""

    def write(self, folder: Path, more: Mapping[str, Array]) -> None:
        """Write `arrays`, and `more` which is alike everywhere, into an empty folder that all processes see.

        Every process calls it; an error in one is an error in all. Afterwards all files are written.
        """

    def read(self, folder: Path, forms: Mapping[str, Form]) -> dict[str, Any]:
        """What `write` wrote, into new memory: NumPy arrays of what `arrays` has as such, of `more` and of 0-dim
        arrays; of the rest what `import_state` takes. Changes nothing of the state; every process calls it.

        Raises:
            CheckpointError: the files hold something else than `forms` says.
        """

    def drawn(self, name: str, seed: int) -> Array:
        """A new stream in the place of `own[name]`; the same for the same seed of 64 bits."""


@runtime_checkable
class LiesInParts(Protocol):
    """A backend whose states may lie in several processes; see `Parts`."""

    def in_parts(self, state: Any) -> contextlib.AbstractContextManager[Parts]:
        """The state, on which no step runs meanwhile. Cheap: nothing is copied or sent on the way in."""
