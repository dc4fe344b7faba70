"""Observer of equinox models: their dropout. The step hooks the calls of their modules itself."""

from __future__ import annotations

import contextlib
from typing import Final

import equinox as eqx

from polyamp.parity.trace.observer import DropoutCount
from polyamp_jax.observe.jax_only.library_observer import LibraryObserver, identity_call, replace_attribute


class EquinoxObserver(LibraryObserver):
    """Observer of equinox models."""

    def disable_dropout(self, stack: contextlib.ExitStack, count: DropoutCount) -> None:
        replace_attribute(stack, eqx.nn.Dropout, "__call__", identity_call("p", "inference", count))


OBSERVER: Final = EquinoxObserver()
