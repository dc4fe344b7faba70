"""The fixture models in every ordered pair of libraries (docs/explanation/moving_models.md).

`python -m tests.porting.table` prints the check's largest relative error of outputs and of any parameter's gradient.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import warnings
from typing import Any

import numpy as np

import polyamp
from polyamp import porting
from tests.fixtures.port import common

LIBRARIES = ("torch", "keras", "linen", "nnx", "equinox", "haiku")
FIRST = ("torch", "equinox")
"""Libraries that have the channels first."""


def batch(library: str, name: str) -> Any:
    """The model's inputs as the library has them."""
    values = common.inputs(name)
    return np.moveaxis(values, -1, 1) if library in FIRST and values.ndim == 4 else values


def main(names: list[str]) -> None:
    """Print one table a model."""
    warnings.simplefilter("ignore")
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # TensorFlow's convolutions beside torch's end the process
    models = {library: importlib.import_module(f"tests.fixtures.port.{library}_models") for library in LIBRARIES}
    for name in names:
        found = {}
        for source, target in itertools.permutations(LIBRARIES, 2):
            given = porting.Batch(batch(source, name), batch(target, name))
            built = models[source].build(name, 0), models[target].build(name, 1)
            checked = polyamp.port(*built, check=given)[1].checked
            assert checked is not None
            found[source, target] = f"{checked.outputs:.0e} / {max(checked.gradients.values()):.0e}"
        print(f"| {name} | to {' | '.join(LIBRARIES)} |\n|{'---|' * (len(LIBRARIES) + 1)}")
        for source in LIBRARIES:
            print(f"| from {source} | {' | '.join(found.get((source, target), '') for target in LIBRARIES)} |")
        print()


if __name__ == "__main__":
    main(sys.argv[1:] or list(common.MODELS))
