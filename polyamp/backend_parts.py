"""`BackendParts`, the base class of polyamp's own backends: their parts that are imported on first use.

polyamp's backends have one shape: a package `polyamp_<name>` with the same files and exports (CONTRIBUTING.md, "The
house"). Porting, comparisons, reports of casts, the doctor, the lint and sharded checkpoints need files that an
ordinary training does not, and these are found here by their names.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np

    from polyamp.contract.casting_report import CastingReport
    from polyamp.contract.sharded_state import ShardedState
    from polyamp.doctor.float8_probe import Float8Probe
    from polyamp.doctor.probe import CapabilityProbe
    from polyamp.linter.setup_figures import SetupFigures, TrainingSetup
    from polyamp.parity.trace.observer import Observer
    from polyamp.porting.layouts.converter import Converter
    from polyamp.porting.states.optimizer_layout import StateConverter
    from polyamp.recipe.policy import Policy


def lazy_part(file: str, export: str, package: str = "") -> Any:
    """Return a property of a backend: what a file of its package, or of `package`, exports; imported on first use.

    >>> class Reader:
    ...     decoder = lazy_part("decoder", "JSONDecoder", package="json")
    >>> Reader().decoder.__name__
    'JSONDecoder'
    """
    return property(lambda backend: _export(package or f"polyamp_{backend.name}", file, export))


class BackendParts:
    """Members of `Backend`, and of the protocols beside it, that a package `polyamp_<name>` has in files of their own.

    A backend of another shape, such as the reference, implements the protocols itself.
    """

    name: str
    """Short name, after which the package is called."""

    porting: Converter = lazy_part("porting.converter", "CONVERTER")
    """Converter of models to and from other frameworks; imported on first use."""
    porting_states: StateConverter = lazy_part("porting.training_states", "STATE_CONVERTER")
    """Converter of training states; imported on first use."""
    observer: Observer = lazy_part("observe.observer", "OBSERVER")
    """Observer of a training for a comparison; imported on first use."""
    capability_probe: CapabilityProbe = lazy_part("observe.capabilities", "PROBE")
    """What measures the devices; imported on first use."""
    float8_probe: Float8Probe = lazy_part("observe.float8_probe", "FLOAT8_PROBE")
    """What measures products in 8 bits; imported on first use."""

    def explain(self, target: Any, policy: Policy, *inputs: Any, strict: bool = False, **options: Any) -> CastingReport:
        return self._casting_report("explain", target, policy, *inputs, strict=strict, **options)

    def explain_compiled(
        self, target: Any, policy: Policy, *inputs: Any, strict: bool = False, **options: Any
    ) -> CastingReport:
        return self._casting_report("explain_compiled", target, policy, *inputs, strict=strict, **options)

    def _casting_report(self, function: str, *arguments: Any, **options: Any) -> CastingReport:
        make = self._own(f"observe.{self.name}_only.casting_reports", function)
        report: CastingReport = make(self, *arguments, **options)
        return report

    def inspect_setup(self, setup: TrainingSetup) -> SetupFigures:
        figures: SetupFigures = self._own("observe.setup_inspection", "inspect_setup")(setup)
        return figures

    def sharded_state(self, state: Any) -> AbstractContextManager[ShardedState]:
        block: AbstractContextManager[ShardedState] = self._own("step.sharded_state", "sharded_state")(state)
        return block

    def describe_state(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
        from polyamp.porting.states.checkpoint_metadata import state_metadata_json

        return state_metadata_json(state, arrays, self.porting, self.porting_states)

    def _own(self, file: str, export: str) -> Any:
        return _export(f"polyamp_{self.name}", file, export)


def _export(package: str, file: str, export: str) -> Any:
    return getattr(importlib.import_module(f"{package}.{file}"), export)
