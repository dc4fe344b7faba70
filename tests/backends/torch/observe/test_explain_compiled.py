"""`polyamp.explain(compiled=True)` for torch: the operations of the compiled graphs, compared with eager ones."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.contract.casting_comparison import compare_families
from polyamp.errors import UnsupportedError

POLICY: Final = polyamp.Policy("mixed_bfloat16", overrides={"head": "float32"})
BATCH: Final = (torch.ones(5, 4), torch.zeros(5, dtype=torch.int64))


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """What one test cannot compile, dynamo would leave alone in the next."""
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, *, recompute: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.recompute, self.breaks = recompute, breaks
        self.body = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5))])
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.body[0], x, use_reentrant=False) if self.recompute else self.body[0](x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(self.norm(x))


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)


def test_the_graphs_have_the_modules_dtypes_and_rules_of_eager_code() -> None:
    report = polyamp.explain(loss_fn, POLICY, Net(), BATCH, compiled=True)
    rows = {(row.module, row.name, row.direction): (row.dtype, row.rule, row.count) for row in report.operations}
    assert rows["body/0/0", "addmm", "forward"] == ("bfloat16", "compute", 1)
    assert rows["head", "addmm", "forward"] == ("float32", "override", 1)
    assert rows["", "log_softmax", "forward"] == ("float32", "float32", 1)
    assert rows["body/0/2", "native_dropout", "forward"][0] == "bfloat16"
    assert rows["body/0/0", "mm", "backward"] == ("bfloat16", "follow", 1)
    assert report.unknown == ()
    assert [note.partition(" that")[0] for note in report.notes] == ["Read from the graphs"]
    found = compare_families(polyamp.explain(loss_fn, POLICY, Net(), BATCH), report)
    assert (found.differences, found.only_first, found.only_second) == ([], [], [])
    assert found.compared == 16


def test_what_a_checkpoint_runs_again_is_named_in_graphs_too() -> None:
    report = polyamp.explain(loss_fn, POLICY, Net(recompute=True), BATCH, compiled=True)
    again = {(row.module, row.name): row.count for row in report.operations if row.direction == "recompute"}
    assert again["body/0/0", "addmm"] == 1
    assert again["body/0/2", "native_dropout"] == 1


def test_a_norm_that_only_compiled_code_runs_in_16_bits_is_found() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if torch.compiler.is_compiling():
                with torch.autocast("cpu", enabled=False):
                    return functional.layer_norm(x.bfloat16(), (8,))
            return functional.layer_norm(x, (8,))

    both = [
        polyamp.explain(lambda model, x: model(x).sum(), "mixed_bfloat16", Hidden(), BATCH[0], compiled=compiled)
        for compiled in (False, True)
    ]
    found = {(row.module, row.family, row.direction): row for row in compare_families(*both).differences}
    assert found["", "normalisation", "forward"][3:5] == ("float32", "bfloat16")


def test_what_is_not_one_graph_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot make one graph .* torch says: Unsupported: .*graph_break"):
        polyamp.explain(loss_fn, "mixed_bfloat16", Net(breaks=True), BATCH, compiled=True)
    with pytest.raises(UnsupportedError, match=r"reference backend of this version reports eager code only|explain"):
        polyamp.explain(lambda x: x, "mixed_bfloat16", 1.0, backend="reference", compiled=True)


def test_a_function_without_a_model() -> None:
    report = polyamp.explain(lambda x: (x @ x).exp(), "mixed_bfloat16", torch.ones(2, 2), compiled=True)
    assert [(row.name, row.dtype) for row in report.operations] == [("mm", "bfloat16"), ("exp", "float32")]
