"""Files of other programs as sources: which reader a file is for. Called by `port`."""

from __future__ import annotations

import os

from polyamp.errors import PortError
from polyamp.porting.inventory import Inventory


def inventory_of(path: str | os.PathLike[str]) -> Inventory:
    """The layers in a file.

    Raises:
        PortError: no reader takes it.
    """
    raise PortError(f"no file of this kind can be read yet: {os.fspath(path)}.")
