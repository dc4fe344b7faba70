"""`OperationCounter`: counts the operations of a pass by module, dtype and rule, for torch's casting reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from polyamp.contract.casting_report import CastCount, CastingReport, OperationCount
from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules.operation_families import ATTENTION
from polyamp_torch.arrays import dtype_name
from polyamp_torch.compat import tree_leaves
from polyamp_torch.observe.torch_only.kernel_lists import DATA_MOVEMENT, kernel_family, kernel_rule
from polyamp_torch.precision.torch_only.op_rules_mode import RUNNING_RULE


class PassCounter(Protocol):
    """What is told every operation of a pass."""

    def count(self, func: Any, inputs: Any, outputs: Any, module: str, direction: str) -> None:
        """Count an operation; see `OperationCounter.count`."""


class OperationCounter:
    """Counts of operations and casts.

    Args:
        plan: the resolved policy.
    """

    def __init__(self, plan: ResolvedPolicy) -> None:
        self._plan = plan
        self._operations: Counter[tuple[str, str, str, str, str]] = Counter()
        self._casts: Counter[tuple[str, str]] = Counter()

    def count(self, func: Any, inputs: Any, outputs: Any, module: str, direction: str) -> None:
        """Count an operation.

        Args:
            func: the overload.
            inputs, outputs: trees with its tensors.
            module: path of the module.
            direction: as in `OperationCount`.
        """
        operands, results = _floating_dtypes(inputs), _floating_dtypes(outputs)
        spelled = func.overloadpacket.__name__
        name = spelled.strip("_")
        if name == "to_copy":
            if operands and results and operands != results:
                self._casts[operands[0], results[0]] += 1
            return
        if name in DATA_MOVEMENT or not results or func.namespace == "prim":
            return
        dtypes = operands or results
        if kernel_family(name) == ATTENTION:
            dtypes = dtypes[:1]  # the query's, or its gradient's; the statistics of a fused softmax are float32
        in_place = spelled.endswith("_") and not spelled.endswith("__")
        rule = self._rule(module, "" if in_place else name, dtypes, direction)
        self._operations[module, name, ", ".join(sorted(dtypes)), rule, direction] += 1

    def report(self, policy: Policy, *, strict: bool, notes: Sequence[str] = ()) -> CastingReport:
        """Return the report.

        Raises:
            UnsupportedError: with `strict`, an operation that no op list names.
        """
        rows = [OperationCount(*key[:4], count, key[4]) for key, count in self._operations.items()]
        casts = [CastCount(*key, count) for key, count in self._casts.items()]
        found = CastingReport(policy, rows, casts, {row.name: kernel_family(row.name) for row in rows}, notes)
        if strict and found.unknown:
            raise UnsupportedError(
                f"explain: no op list names {', '.join(found.unknown)}. strict=False lists them as rows."
            )
        return found

    def _rule(self, module: str, name: str, dtypes: list[str], direction: str) -> str:
        """Return the rule of an operation; `name` is empty for an operation in place."""
        if RUNNING_RULE.word == "float8":
            return "float8"
        parts = module.split("/")
        named = any("/".join(parts[:n]) in self._plan.overridden for n in range(1, len(parts) + 1))
        if named:
            return "override"
        if not self._plan.mixes:
            return "off"
        if direction == "backward" or not name:
            return "follow"
        if RUNNING_RULE.word:
            return f"{RUNNING_RULE.word} (op_rules)"
        rule = kernel_rule(name)
        listed = self._plan.compute if rule == "compute" else "float32" if rule == "float32" and self._plan.kept else ""
        return f"{rule} (uncast)" if listed and listed not in dtypes else rule


def _floating_dtypes(tree: Any) -> list[str]:
    """Return the dtypes of the floating tensors of a tree, each once. Numbers in tensors without axes do not count
    beside arrays, as in torch's promotion."""
    tensors = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    arrays = [x for x in tensors if x.ndim] or tensors
    return list(dict.fromkeys(dtype_name(x.dtype) for x in arrays))
