"""`ResolvedPolicy`: a policy resolved once against a model's module paths (S1 to S5).

For each module it stores the compute dtype, whether autocast is active, and whether the sensitive families of S4 stay
in float32. Backends create one at `init` with `policy.plan(paths)` and only read it: they match no globs and do not
interpret the policy's dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.float8 import FLOAT8_OVERRIDE, Float8
from polyamp.records import Record


class ModulePrecision(NamedTuple):
    """Precision of one module under a policy.

    Attributes:
        dtype: its compute dtype.
        named: the dtype that an override gives it, or None if the policy's `compute` applies.
        mixes: whether autocast is active: the module computes in 16 bits, its master weights are wider, and each
            operation picks its dtype (S3).
        kept: whether autocast is active and S4's sensitive families stay in float32.
        float8: settings of its products in 8 bits, or None (S36).
    """

    dtype: str
    named: str | None
    mixes: bool
    kept: bool
    float8: Float8 | None = None


class ResolvedPolicy(Record):
    """Policy resolved for one model. Frozen and hashable; equal if policy and overridden paths are equal.

    Args:
        policy: the policy.
        overridden: module path -> dtype of the modules that an override covers, from `Policy.resolve_overrides`;
            "float8" for the policy's compute dtype with products in 8 bits.

    Attributes:
        policy: the policy, for messages and reports.
        param, compute, output, float32_matmul, op_rules: as in the policy.
        cast: whether parameters and inputs are cast once at the model's boundary (mode "cast").
        float64: whether float64 leaves are cast too, because the policy names float64 itself (S2).
        overridden: as given.
        overridden_dtypes: module path -> compute dtype of the modules that an override covers.
        root: the precision of a module without an override.
        kept: whether S4's families stay in float32 wherever autocast is active.
        mixes: whether autocast is active anywhere.
        narrow: the 16-bit dtypes among the compute dtypes, sorted.

    Example:
        >>> from polyamp import Policy
        >>> plan = Policy("mixed_float16", overrides={"head": "float32"}).plan(["", "body", "head"])
        >>> plan.at("body").mixes, plan.at("head/dense").dtype, plan.narrow
        (True, 'float32', ('float16',))
    """

    policy: Any
    overridden: Mapping[str, str]
    param: ClassVar[str]
    compute: ClassVar[str]
    output: ClassVar[str]
    float32_matmul: ClassVar[str | None]
    op_rules: ClassVar[Mapping[str, str]]
    cast: ClassVar[bool]
    float64: ClassVar[bool]
    root: ClassVar[ModulePrecision]
    kept: ClassVar[bool]
    mixes: ClassVar[bool]
    narrow: ClassVar[tuple[str, ...]]
    overridden_dtypes: ClassVar[Mapping[str, str]]
    _places: ClassVar[dict[str, ModulePrecision]]  # these are per instance, no fields

    def __post_init__(self) -> None:
        policy, found = self.policy, dict(self.overridden)
        places = {path: module_precision(policy, dtype) for path, dtype in found.items()}
        dtypes = {policy.compute, *(place.dtype for place in places.values())}
        fields: dict[str, Any] = {
            **{name: getattr(policy, name) for name in ("param", "compute", "output", "float32_matmul", "op_rules")},
            "cast": policy.mode == "cast",
            "float64": policy.casts_float64,
            "overridden": MappingProxyType(found),
            "kept": policy.mode != "cast" and policy.op_list == "polyamp",
            "mixes": any(_is_mixed(policy, dtype) for dtype in dtypes),
            "narrow": tuple(sorted(dtypes.intersection(HALF_DTYPES))),
            "overridden_dtypes": MappingProxyType({path: place.dtype for path, place in places.items()}),
            "_places": places,
            "root": module_precision(policy, None),
        }
        for name, value in fields.items():
            self._set_field(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("Plan is frozen; make another with policy.plan(paths).")

    def _key(self) -> tuple[Any, ...]:
        return self.policy, tuple(sorted(self.overridden.items()))

    def _init_arguments(self) -> dict[str, Any]:
        return {"policy": self.policy, "overridden": dict(self.overridden)}  # a mapping proxy cannot be pickled

    def __repr__(self) -> str:
        return f"Plan({self.policy}, overridden={dict(self.overridden)})"

    def at(self, path: str) -> ModulePrecision:
        """Return the precision of the module at `path`, or of its nearest known parent.

        A lookup: a module that an override covers passes it on to its submodules.
        """
        if not self._places:
            return self.root
        found = self._places.get(path)
        while found is None and path:
            path = path.rpartition("/")[0]
            found = self._places.get(path)
        return self.root if found is None else found

    def place(self, dtype: str) -> ModulePrecision:
        """Return the precision of a module that computes in `dtype` because of an override or the model's choice."""
        return module_precision(self.policy, dtype)


def _is_mixed(policy: Any, dtype: str) -> bool:
    """Whether operations of a module that computes in `dtype` pick their own dtypes (S3)."""
    return policy.mode != "cast" and dtype in HALF_DTYPES and policy.param != dtype


def module_precision(policy: Any, named: str | None) -> ModulePrecision:
    """Return the precision of a module with the override `named`; with None, of a module without an override."""
    dtype = policy.compute if named in (None, FLOAT8_OVERRIDE) else named
    mixes = _is_mixed(policy, dtype)
    float8 = policy.float8 if named in (None, FLOAT8_OVERRIDE) else None
    return ModulePrecision(dtype, named, mixes, mixes and policy.op_list == "polyamp", float8)
