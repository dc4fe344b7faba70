"""`CastingReport`: the dtype of each operation of a function and its reason, as returned by `polyamp.explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from polyamp.display import first_lines, html_table, table_lines
from polyamp.recipe.policy import Policy

if TYPE_CHECKING:
    from pathlib import Path


class OperationCount(NamedTuple):
    """One row: the operations of one kind in one module with the same dtype and reason.

    Attributes:
        module: path of the module, "" at the top.
        name: the framework's name of the operation.
        dtype: its dtype; "float16, float32" if its operands differ.
        rule: the reason: an op list ("compute", "float32", "promote", "follow"), "override", "opaque", "unknown"
            (opaque because no list names it), "keep_precision", or "off" (the policy mixes no dtypes there). A word in
            brackets names a special case: "compute (uncast)" and "float32 (uncast)" ran in another dtype than their
            list says (in torch: autocast was off around them, or torch's own code cast before them).
        count: number of operations; the body of a loop counts once.
        direction: "forward"; of a loss also "backward", and "recompute" for the forward operations that a backward
            pass runs again (activation checkpointing).
    """

    module: str
    name: str
    dtype: str
    rule: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which has no use here
    direction: str = "forward"


class CastCount(NamedTuple):
    """Casts that autocast inserted. Attributes: the two dtypes, and the number of casts."""

    source: str
    target: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which has no use here


class DtypeDifference(NamedTuple):
    """Operations of one kind in one module that ran in other dtypes in two reports.

    Attributes: as in `OperationCount`; `first` and `second` are the dtypes in the two reports, "" where there is none.
    """

    module: str
    name: str
    direction: str
    first: str
    second: str


class CastingReport:
    """Result of `polyamp.explain`; `print` it for a table.

    Attributes:
        policy: the policy.
        operations: rows in order of first appearance. Operations that only move data (reshape, transpose, slice, ...)
            have none.
        casts: casts that autocast inserted, by source and target.
        families: operation -> its family (`polyamp.rules.operation_families`), by which reports are compared that name
            operations differently: of two frameworks, or of eager and compiled code.
        notes: what the report does not cover, a sentence each.
    """

    def __init__(
        self,
        policy: Policy,
        operations: Sequence[OperationCount],
        casts: Sequence[CastCount],
        families: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.policy = policy
        self.operations = tuple(operations)
        self.casts = tuple(casts)
        self.families = dict(families or {})
        self.notes = tuple(notes)

    @property
    def opaque(self) -> tuple[str, ...]:
        """Names of the operations that ran in the dtypes that the program declares, sorted."""
        return tuple(sorted({row.name for row in self.operations if row.rule in ("opaque", "unknown")}))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Those of `opaque` that no op list names, sorted."""
        return tuple(sorted({row.name for row in self.operations if row.rule == "unknown"}))

    @property
    def kept(self) -> tuple[OperationCount, ...]:
        """Rows of the forward pass that ran in float32 alone although the policy computes in another dtype; `rule` is
        the reason."""
        if self.policy.compute == "float32":
            return ()
        return tuple(row for row in self.operations if row.dtype == "float32" and row.direction == "forward")

    def renamed(self, modules: Mapping[str, str]) -> CastingReport:
        """Return the report with other module paths, to compare models of two libraries; other paths stay."""
        rows = [row._replace(module=modules.get(row.module, row.module)) for row in self.operations]
        return CastingReport(self.policy, rows, self.casts, self.families, self.notes)

    def diff(self, other: CastingReport) -> list[DtypeDifference]:
        """Return the operations that run in other dtypes in another report of the same program, in order.

        Operations are compared by module, name and direction. Reports of two frameworks, and of eager and compiled
        code, have other names: see `polyamp.contract.casting_comparison.compare_families`.

        Example:
            >>> import jax, jax.numpy as jnp, polyamp
            >>> layer = lambda w, x: jnp.exp(x @ w)
            >>> inputs = jnp.ones((2, 3)), jnp.ones((4, 2))
            >>> one, two = (polyamp.explain(layer, name, *inputs) for name in ("mixed_float16", "mixed_bfloat16"))
            >>> one.diff(two)
            [DtypeDifference(module='', name='dot_general', direction='forward', first='float16', second='bfloat16')]
        """
        sides = [_dtypes_by_operation(report.operations) for report in (self, other)]
        keys = dict.fromkeys([*sides[0], *sides[1]])
        found = [DtypeDifference(*key, *(", ".join(side.get(key, ())) for side in sides)) for key in keys]
        return [each for each in found if each.first != each.second]

    def save(self, path: str | Path) -> Path:
        """Draw the report to an .html or .png file (extra `parity`).

        Raises:
            ArgumentError: another suffix, or a path that cannot be written to.
        """
        from polyamp.contract.casting_page import casting_page
        from polyamp.report_page.page_files import save_page

        return save_page(casting_page(str(self.policy), self.operations, self.casts), path)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return {
            "policy": self.policy.to_dict(),
            "operations": [row._asdict() for row in self.operations],
            "casts": [cast._asdict() for cast in self.casts],
            "opaque": list(self.opaque),
            "unknown": list(self.unknown),
            "families": dict(self.families),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CastingReport:
        """Return the report of which `to_dict` is the plain data."""
        return cls(
            Policy(**data["policy"]),
            [OperationCount(**row) for row in data["operations"]],
            [CastCount(**cast) for cast in data["casts"]],
            data["families"],
            data["notes"],
        )

    def _repr_html_(self) -> str:
        return html_table(f"casts under {self.policy}", OperationCount._fields, self.operations)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CastingReport):
            return NotImplemented
        return (self.policy, sorted(self.operations), sorted(self.casts)) == (
            other.policy,
            sorted(other.operations),
            sorted(other.casts),
        )

    __hash__ = None  # type: ignore[assignment]  # compared by value, and not meant as a dictionary key

    def __str__(self) -> str:
        directions = any(row.direction != "forward" for row in self.operations)
        table: list[Sequence[Any]] = [("module", "operation", "dtype", "rule", *["direction"][:directions], "count")]
        table += [(*row[:4], *[row.direction][:directions], row.count) for row in self.operations]
        lines = [str(self.policy), "", *_format_table(table)]
        casts = ", ".join(f"{cast.count} {cast.source} -> {cast.target}" for cast in self.casts) or "none"
        lines += ["", f"casts: {casts}", f"opaque: {', '.join(self.opaque) or 'none'}"]
        if self.unknown:
            lines.append(f"no op list names: {', '.join(self.unknown)}")
        lines += self.notes
        return "\n".join(lines)

    def __repr__(self) -> str:
        return first_lines(str(self))


def _dtypes_by_operation(rows: Sequence[OperationCount]) -> dict[tuple[str, str, str], tuple[str, ...]]:
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        found.setdefault((row.module, row.name, row.direction), {})[row.dtype] = None
    return {key: tuple(sorted(dtypes)) for key, dtypes in found.items()}


def _format_table(rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [[str(cell) or "." for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return table_lines([cells[0], ["-" * width for width in widths], *cells[1:]], right=1)
