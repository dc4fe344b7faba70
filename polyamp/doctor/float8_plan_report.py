"""`Float8PlanReport`: which layers of a model run in 8 bits, as text, page, files, overrides and recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from polyamp.display import first_lines, table_lines
from polyamp.doctor.float8_plan_data import LAYER_HEADING, Float8PlanFindings, layer_rows
from polyamp.errors import ArgumentError, UnsupportedError
from polyamp.recipe.float8 import FLOAT8_OVERRIDE
from polyamp.recipe.overrides import deciding_glob
from polyamp.recipe.recipe import Recipe


class Float8PlanReport(Float8PlanFindings, frozen=True, kw_only=True):
    """What `polyamp.float8_plan` found; `print` it.

    Attributes:
        backend, policy: what was measured.
        device: its name in the framework ("cuda:0"); device_label: the model of an accelerator ("NVIDIA H100").
        emulated: whether the 8-bit numbers were multiplied in float32. Then the times decide nothing.
        compiled: whether compiled programs were measured. JAX always compiles.
        least_speed: speed relative to bfloat16 from which on a module runs in 8 bits.
        layers: a row for each module and shape, in the order of the program: sizes, times, speed and decision.
        overrides: for `Policy(overrides=...)`: the layers that are slower in 8 bits stay in bfloat16.
    """

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return a recipe with these overrides added to its policy's own.

        Raises:
            UnsupportedError: the times are of emulated products, which decide nothing.
            ArgumentError: the recipe's policy has no products in 8 bits, or one of its own overrides decides otherwise.
        """
        if self.emulated:
            raise UnsupportedError(
                f"recipe: the times are of emulated products on {self.device!r}, which decide nothing. Make the plan "
                "on the device that you train on, without Float8(emulate=True)."
            )
        if recipe.policy.float8 is None:
            raise ArgumentError(
                f"recipe must have a policy with products in 8 bits. Received: {recipe.policy}. Use "
                'recipe.replace(policy="mixed_float8").'
            )
        overrides = {**recipe.policy.overrides, **self.overrides}
        for row in self.layers:
            glob = deciding_glob(overrides, row.module)
            if (glob is None or overrides[glob] == FLOAT8_OVERRIDE) is not (row.decision == "float8"):
                raise ArgumentError(
                    f"recipe: the override {glob!r} of its policy decides about the module {row.module!r}, for which "
                    f"the plan says {row.decision!r}: the longest glob decides. Leave it out, or name modules in full."
                )
        return recipe.replace(policy=recipe.policy.replace(overrides=overrides))

    def __str__(self) -> str:
        label = "" if self.device_label == self.device else f" ({self.device_label})"
        how = "compiled" if self.compiled else "eager"
        lines = [self.verdict(), f"{self.backend}, {self.policy}; {self.device}{label}, {how}"]
        if self.layers:
            lines += ["", *table_lines([LAYER_HEADING, *layer_rows(self)])]
        if self.overrides:
            lines += ["", f"overrides = {self.overrides!r}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return first_lines(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return {**found, "overrides": self.overrides, "milliseconds": self.milliseconds}

    def save(self, path: str | Path) -> Path:
        """Write the report as .json, .html or .png, by the suffix of the path.

        Raises:
            ArgumentError: another suffix, a path that cannot be written to, or a missing package (extra `parity`).
        """
        from polyamp.doctor.float8_plan_page import float8_plan_page
        from polyamp.report_page.page_files import save_page

        return save_page(float8_plan_page(self), path, data=self.to_dict())
