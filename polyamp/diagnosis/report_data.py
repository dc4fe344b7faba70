"""What a diagnosis found, as data: magnitudes of modules, trials, and `DiagnoseFindings`."""

from __future__ import annotations

from typing import Literal

import msgspec

from polyamp.monitor.records import TensorStats

Outcome = Literal["fits", "overrides", "outside", "float32"]
_MOST_LISTED = 12


class ModuleMagnitudes(msgspec.Struct, frozen=True, kw_only=True):
    """Exponents of one module in the float32 run, judged in the policy's compute dtype.

    Attributes:
        module: its path.
        activations: its output; None if it has no floating output.
        cotangents: the gradient with respect to its output, times the recommended loss scale.
        gradients: those of its own parameters, times that scale.
        weights: its own parameters.
    """

    module: str
    activations: TensorStats | None = None
    cotangents: TensorStats | None = None
    gradients: TensorStats | None = None
    weights: TensorStats | None = None


class DiagnosisTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One training under the policy with some modules in float32.

    Attributes:
        float32: those modules.
        agrees: whether its losses follow those of float32.
        distance: the largest relative distance of a loss; None if one was not finite or steps were skipped for good.
        updates: number of updates that were applied.
    """

    float32: list[str]
    agrees: bool
    distance: float | None
    updates: int


class DiagnoseFindings(msgspec.Struct, frozen=True, kw_only=True):
    """What `polyamp.diagnose` found; its public form is `DiagnoseReport`.

    Attributes:
        outcome: "fits": the policy works as it is; "overrides": it works with `sensitive` in float32; "outside": it
            fails with all modules in float32, so the loss function or code between modules is to blame; "float32":
            the training fails in float32 too, which no policy mends.
        sensitive: the smallest set of modules that must stay in float32.
        backend, policy, compute: what was diagnosed.
        updates: number of updates of each training.
        tolerance: the largest relative distance of a loss that counts as agreement.
        loss_scale: the largest power of two that keeps all gradients 8 times below the compute dtype's largest number;
            1.0 for a dtype that needs no scale.
        largest_gradient: the largest magnitude of a gradient or cotangent that was seen, unscaled.
        trials: the trainings, in order; the first is without overrides.
        modules: magnitudes of all visible modules, in the order of the program.
        losses: the losses of the float32 training.
    """

    outcome: Outcome
    sensitive: list[str]
    backend: str
    policy: str
    compute: str
    updates: int
    tolerance: float
    loss_scale: float
    largest_gradient: float
    trials: list[DiagnosisTrial]
    modules: list[ModuleMagnitudes]
    losses: list[float]

    @property
    def overrides(self) -> dict[str, str]:
        """What `Policy(overrides=...)` takes so that the sensitive modules stay in float32.

        Submodules of a sensitive module are covered by it; those that are not sensitive get the compute dtype back.
        """
        return overrides_of(self.sensitive, [each.module for each in self.modules], self.compute)

    def verdict(self) -> str:
        """Return the result as a sentence."""
        if self.outcome == "float32":
            return "The training is not finite in float32 either: no precision policy mends it."
        if self.outcome == "fits":
            return f"{self.compute} fits: the losses follow those of float32 without overrides."
        if self.outcome == "outside":
            return (
                f"{self.compute} fails even with every module in float32: look at the loss function and at code "
                "between modules."
            )
        count = "1 module" if len(self.sensitive) == 1 else f"{len(self.sensitive)} modules"
        return f"{count} must stay in float32: {', '.join(self.sensitive[:_MOST_LISTED])}."


def overrides_of(sensitive: list[str], modules: list[str], compute: str) -> dict[str, str]:
    """Return overrides that keep these modules in float32, and none of the other modules."""
    chosen = set(sensitive)
    found = dict.fromkeys(sensitive, "float32")
    for module in modules:
        parents = [module[:end] for end, letter in enumerate(module) if letter == "/"]
        if module not in chosen and chosen.intersection(parents):
            found[module] = compute
    return found
