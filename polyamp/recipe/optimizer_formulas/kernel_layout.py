"""Axes of a kernel: which of them are its outputs and inputs, for formulas that treat a parameter as a matrix."""

from __future__ import annotations

from typing import Final, Literal, get_args

from polyamp.recipe.optimizer_spec import ParameterFacts

KernelLayout = Literal["auto", "out_in", "in_out"]
"""Order of a kernel's outputs and inputs. "out_in" as in torch: (outputs, inputs, positions...). "in_out" as in Keras
and flax: (positions..., inputs, outputs). "auto": that of the parameter's library; for an array alone, torch's."""
KERNEL_LAYOUTS: Final = get_args(KernelLayout)


def kernel_layout(parameter: ParameterFacts) -> KernelLayout:
    """Return the layout of a parameter's library."""
    return "out_in" if parameter.outputs_first else "in_out"


def matrix_axes(layout: KernelLayout, dimensions: int) -> tuple[int, int]:
    """Return the two axes of a kernel that are not positions, in their order.

    >>> matrix_axes("out_in", 4), matrix_axes("in_out", 4), matrix_axes("in_out", 2)
    ((0, 1), (2, 3), (0, 1))
    """
    return (dimensions - 2, dimensions - 1) if layout == "in_out" else (0, 1)
