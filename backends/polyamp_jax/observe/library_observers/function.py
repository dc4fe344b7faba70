"""Observer of plain functions with their parameters."""

from __future__ import annotations

from typing import Final

from polyamp_jax.observe.jax_only.library_observer import LibraryObserver

OBSERVER: Final = LibraryObserver()
