"""`Plan`: a policy resolved against a model's module paths, once (S1 to S5).

It says of each module in which dtype it computes, whether autocast acts there, and whether the sensitive families of
S4 are held in float32. Backends make one at `init`, by `policy.plan(paths)`, and read it: none of them matches a glob
or asks the policy's dtypes what they mean together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

NARROW: Final = ("float16", "bfloat16")


class Settings(Protocol):
    """The fields of a policy; see `Policy`."""

    @property
    def param(self) -> str:
        """Dtype of the masters."""

    @property
    def compute(self) -> str:
        """Dtype of matrix products."""

    @property
    def output(self) -> str:
        """Dtype that the model returns."""

    @property
    def mode(self) -> str | None:
        """ "autocast", "cast" or None."""

    @property
    def overrides(self) -> Mapping[str, str]:
        """Glob -> dtype."""

    @property
    def float32_matmul(self) -> str | None:
        """Precision of float32 matrix products."""

    @property
    def op_list(self) -> str:
        """ "polyamp" or "native"."""

    @property
    def op_rules(self) -> Mapping[str, str]:
        """Operation -> rule."""


class Place(NamedTuple):
    """What a policy says of one module.

    Attributes:
        dtype: that it computes in.
        named: the dtype that an override gives it, or None where the policy's `compute` holds.
        mixes: whether autocast acts there: it computes in 16 bits under wider masters, and each operation picks its
            dtype (S3).
        kept: whether it acts and S4's sensitive families are held in float32.
    """

    dtype: str
    named: str | None
    mixes: bool
    kept: bool


class Plan:
    """A policy resolved for one model. Frozen and hashable; equal where policy and paths with overrides are.

    Args:
        policy: the policy.
        overridden: module path -> dtype, of the modules that an override covers, as `overrides.resolved` finds them.

    Attributes:
        policy: the policy, for messages and reports.
        param, compute, output, float32_matmul, op_rules: as the policy says.
        cast: whether parameters and inputs are cast once at the model's boundary (mode "cast").
        float64: whether float64 leaves are cast too: the policy names float64 itself (S2).
        overridden: as given.
        root: the place of a module without an override.
        kept: whether S4's families are held in float32 wherever autocast acts.
        mixes: whether autocast acts anywhere.
        narrow: the 16-bit dtypes that occur as a dtype of computation, sorted.

    Example:
        >>> from polyamp import Policy
        >>> plan = Policy("mixed_float16", overrides={"head": "float32"}).plan(["", "body", "head"])
        >>> plan.at("body").mixes, plan.at("head/dense").dtype, plan.narrow
        (True, 'float32', ('float16',))
    """

    __slots__ = (
        "_hash",
        "_key",
        "_places",
        "cast",
        "compute",
        "float32_matmul",
        "float64",
        "kept",
        "mixes",
        "narrow",
        "op_rules",
        "output",
        "overridden",
        "param",
        "policy",
        "root",
    )

    policy: Any
    param: str
    compute: str
    output: str
    float32_matmul: str | None
    op_rules: Mapping[str, str]
    cast: bool
    float64: bool
    overridden: Mapping[str, str]
    root: Place
    kept: bool
    mixes: bool
    narrow: tuple[str, ...]
    _hash: int
    _key: tuple[Any, ...]
    _places: dict[str, Place]

    def __init__(self, policy: Settings, overridden: Mapping[str, str]) -> None:
        found = dict(overridden)
        dtypes = {policy.compute, *found.values()}
        key = (policy, tuple(sorted(found.items())))
        fields: dict[str, Any] = {
            "policy": policy,
            **{name: getattr(policy, name) for name in ("param", "compute", "output", "float32_matmul", "op_rules")},
            "cast": policy.mode == "cast",
            "float64": "float64" in (policy.param, policy.compute, policy.output),
            "overridden": MappingProxyType(found),
            "kept": policy.mode != "cast" and policy.op_list == "polyamp",
            "mixes": any(_mixes(policy, dtype) for dtype in dtypes),
            "narrow": tuple(sorted(dtypes.intersection(NARROW))),
            "_key": key,
            "_hash": hash(key),
            "_places": {path: place_of(policy, dtype) for path, dtype in found.items()},
            "root": place_of(policy, None),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("Plan is frozen; make another with policy.plan(paths).")

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._key == other._key) if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.policy, dict(self.overridden))

    def __repr__(self) -> str:
        return f"Plan({self.policy}, overridden={dict(self.overridden)})"

    def at(self, path: str) -> Place:
        """The place of the module at `path`, or of the nearest known module around it.

        A lookup: what is inside of a module that an override covers is covered too.
        """
        if not self._places:
            return self.root
        found = self._places.get(path)
        while found is None and path:
            path = path.rpartition("/")[0]
            found = self._places.get(path)
        return self.root if found is None else found

    def place(self, dtype: str) -> Place:
        """What the policy says of a module that computes in `dtype`, as an override or a choice of the model's."""
        return place_of(self.policy, dtype)


def _mixes(policy: Settings, dtype: str) -> bool:
    """S3: whether operations in a module that computes in `dtype` pick their own."""
    return policy.mode != "cast" and dtype in NARROW and policy.param != dtype


def place_of(policy: Settings, named: str | None) -> Place:
    """The place of a module to which an override gives the dtype `named`, or, with None, of every other."""
    dtype = policy.compute if named is None else named
    mixes = _mixes(policy, dtype)
    return Place(dtype, named, mixes, mixes and policy.op_list == "polyamp")
