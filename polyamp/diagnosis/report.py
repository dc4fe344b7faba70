"""`DiagnoseReport`: what a diagnosis found, as text, page, files and overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from polyamp.diagnosis.report_data import DiagnoseFindings, ModuleMagnitudes
from polyamp.display import first_lines
from polyamp.recipe.recipe import Recipe


class DiagnoseReport(DiagnoseFindings, frozen=True, kw_only=True):
    """What `polyamp.diagnose` found; `print` it.

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

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return a recipe with these overrides added to its policy's own."""
        policy = recipe.policy.replace(overrides={**recipe.policy.overrides, **self.overrides})
        return recipe.replace(policy=policy)

    def __str__(self) -> str:
        lines = [self.verdict(), f"{self.backend}, {self.policy}; {self.updates} updates, {len(self.trials)} trials"]
        if self.loss_scale != 1.0:
            lines.append(f"loss scale: {self.loss_scale:g} (largest gradient {self.largest_gradient:.3g})")
        if self.sensitive:
            lines.append(f"overrides = {self.overrides!r}")
            known = {each.module: each for each in self.modules}
            lines += [f"  {name}: {_why(known[name], self.compute)}" for name in self.sensitive if name in known]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return first_lines(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return {**found, "overrides": self.overrides}

    def save(self, path: str | Path) -> Path:
        """Write the report as .json, .html or .png, by the suffix of the path.

        Raises:
            ArgumentError: another suffix, a path that cannot be written to, or a missing package (extra `parity`).
        """
        from polyamp.diagnosis.diagnose_page import diagnose_page
        from polyamp.report_page.page_files import save_page

        return save_page(diagnose_page(self), path, data=self.to_dict())


def _why(each: ModuleMagnitudes, compute: str) -> str:
    """Return what of a module's numbers does not fit the compute dtype."""
    said = []
    for name in ("activations", "weights", "cotangents", "gradients"):
        stats = getattr(each, name)
        if stats is not None:
            if stats.overflow:
                said.append(f"{100 * stats.overflow:.2g} % of its {name} overflow")
            if stats.underflow + stats.subnormal > 0.01:
                said.append(
                    f"{100 * (stats.underflow + stats.subnormal):.2g} % of its {name} underflow or are subnormal"
                )
    return "; ".join(said) or f"its outputs fit {compute}, so it is the arithmetic inside"
