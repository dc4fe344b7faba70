"""Subjects of the conformance suite: a backend with models of its own framework, or of a library on top of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from polyamp.contract.backend import Backend
    from polyamp.contract.harness import Harness


class Subject(NamedTuple):
    """What the suite runs on.

    Attributes:
        name: as given by `--polyamp-backend`.
        backend: the backend.
        harness: its models.
    """

    name: str
    backend: Backend
    harness: Harness


def find_subject(name: str) -> Subject:
    """Return the subject of a name: "torch", or "keras-torch" for Keras's models on the torch backend.

    Raises:
        BackendError: no backend has the name.
        UnsupportedError: the backend trains no models of the library, or not in this process.

    Example:
        >>> find_subject("reference").backend.name
        'reference'
    """
    from polyamp.contract import registry
    from polyamp.contract.harness import HasLibraryHarnesses
    from polyamp.errors import UnsupportedError

    library, _, own = name.rpartition("-")
    if not library or name in registry.entries():
        backend = registry.get(name)
        return Subject(name, backend, backend.testing())
    backend = registry.get(own)
    if not isinstance(backend, HasLibraryHarnesses):
        raise UnsupportedError(f"the {own} backend trains models of its own framework alone. Received: {name!r}.")
    return Subject(name, backend, backend.library_harness(library))
