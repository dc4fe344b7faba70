"""Runs the blocks of one section of the page on public models: `python -m tests.porting.public SECTION`.

It prints a line of JSON, heading -> what the report says. torch comes first, with running statistics and biases that
are not what a fresh model has, for a mistake in those would not show.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

from tests import xla
from tests.porting.public.page import blocks


def entered(model: torch.nn.Module) -> torch.nn.Module:
    """The model for inference with other values in its vectors and statistics."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("running_var"):
                value.uniform_(0.5, 2.0, generator=rng)
            elif value.ndim == 1 and value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=rng), alpha=0.1)
    return torch.nn.Module.train(model, False)


def main(section: str) -> None:
    """See the module."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    xla.quick()
    torch.nn.Module.eval = entered  # type: ignore[method-assign,assignment]  # the blocks call it on each source
    namespace: dict[str, Any] = {}
    found = {}
    for heading, code in blocks(section):
        namespace.pop("report", None)
        exec(compile(code, heading, "exec"), namespace)
        if (report := namespace.get("report")) is None:
            continue
        gradients = report.checked.gradients
        found[heading] = {
            "layers": len(report.moved),
            "untouched": [*report.missing, *report.unused],
            "outputs": float(report.checked.outputs),
            "gradients": float(max(gradients.values())),
            "parameters": len(gradients),
            "differences": sorted({each.attribute for each in report.differences}),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
