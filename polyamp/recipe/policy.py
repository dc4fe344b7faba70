"""`Policy`: which dtype parameters, computations and outputs have (rules S1 to S5).

A policy is a frozen description; it imports no framework. `policy.autocast`, `policy.native` and the
`cast_to_*` methods find the backend from what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Never, TypeVar

from polyamp.dtypes import BYTES, canonical, name_of
from polyamp.errors import PolicyError, PolyampError, did_you_mean
from polyamp.lookup import registry
from polyamp.recipe import dialects
from polyamp.records import Record, unknown_arguments
from polyamp.rules import aliases as alias_names
from polyamp.rules import overrides as globs
from polyamp.rules.plan import Plan

Mode = Literal["autocast", "cast"]
_CHOICES: Final[dict[str, tuple[str | None, ...]]] = {
    "mode": (None, "autocast", "cast"),
    "float32_matmul": (None, "highest", "high", "medium"),
    "op_list": ("polyamp", "native"),
}
_EXTRAS: Final[tuple[tuple[str, Any], ...]] = (
    ("float32_matmul", None),
    ("op_list", "polyamp"),
    ("op_rules", MappingProxyType({})),
)
_TABLES: Final = ("overrides", "op_rules", "aliases")
_RULES: Final = ("compute", "float32", "promote", "follow", "opaque")
_Target = TypeVar("_Target")


class Policy(Record, kw_only=True):
    """Three dtypes and how they are applied.

    Args:
        spelling: a word of another library ("mixed_float16", "bf16-mixed", "fp16", "O2",
            "params=float32,compute=bf16,output=f32"); see `polyamp.recipe.dialects`.
        param: dtype in which parameters are stored, the master weights.
        compute: dtype of matrix multiplications, convolutions and attention.
        output: dtype the model returns.
        mode: "autocast" (each operation picks its dtype), "cast" (parameters and inputs are cast once at the
            model's boundary), or None for the backend's own default.
        overrides: module-path glob -> dtype, `/`-separated in every framework; `*` stays inside one path segment,
            `**` crosses segments, and a glob that matches a module covers what is inside it. The longest matching
            glob wins (of two equally long ones, the last in alphabetical order).
        float32_matmul: precision of float32 matrix multiplications where the device has a faster one (TF32):
            "highest", "high", "medium", or None to leave the framework's setting alone. In torch and TensorFlow it is a
            setting of the process: two threads that want different ones at the same time get an UnsupportedError.
        op_list: "polyamp" keeps sensitive operations in float32 in autocast mode (S4); "native" keeps the
            framework's own list.
        op_rules: name of an operation -> rule, to change an entry of the op list in autocast mode: "compute",
            "float32", "promote" (the widest dtype among its operands), "follow" (the operand's dtype) or "opaque" (the
            dtypes that the program declares). Names are the framework's; in JAX those of its primitives.
        aliases: names for modules whose paths differ between frameworks, to be used in `overrides`; usually given to
            the `Recipe`, which uses them for parameter groups too.

    Raises:
        PolicyError: an unknown word or dtype, or dtypes that contradict each other.

    Example:
        >>> Policy("mixed_float16")
        Policy(param='float32', compute='float16', output='float32')
        >>> Policy("mixed_float16") == Policy("fp16") == Policy(compute="float16")
        True
        >>> print(Policy("fp16"))
        Policy(param='float32', compute='float16', output='float32') [mixed: float32 master weights]
        >>> print(Policy("float16"))
        Policy(param='float16', compute='float16', output='float16') [pure: no float32 master weights]
        >>> Policy("O2").mode
        'cast'
    """

    word: ClassVar[str] = "policy"
    error: ClassVar[type[PolyampError]] = PolicyError

    param: str
    compute: str
    output: str
    mode: Mode | None
    overrides: Mapping[str, str]
    float32_matmul: str | None
    op_list: str
    op_rules: Mapping[str, str]
    aliases: Mapping[str, Mapping[str, str]]

    def __init__(
        self,
        spelling: str | None = None,
        /,
        *,
        param: Any = None,
        compute: Any = None,
        output: Any = None,
        mode: Mode | None = None,
        overrides: Mapping[str, Any] | None = None,
        float32_matmul: Literal["highest", "high", "medium"] | None = None,
        op_list: Literal["polyamp", "native"] = "polyamp",
        op_rules: Mapping[str, str] | None = None,
        aliases: Mapping[str, Mapping[str, str]] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise unknown_arguments(Policy, list(unknown))
        dtypes = {"param": param, "compute": compute, "output": output}
        if isinstance(spelling, Policy):
            raise PolicyError("policy is already a Policy; use policy.replace(...) to change one of its fields.")
        if spelling is not None:
            if not isinstance(spelling, str):
                raise PolicyError(
                    f"policy must be a string such as 'mixed_float16'. Received: {spelling!r}.{no_spelling(spelling)}"
                )
            doubled = [name for name, value in dtypes.items() if value is not None]
            if doubled:
                raise PolicyError(
                    f"{spelling!r} already settles {', '.join(doubled)}; give either the word or the dtypes."
                )
            word = dialects.parse(spelling)
            dtypes = {"param": word.param, "compute": word.compute, "output": word.output}
            if mode is not None and word.mode is not None and mode != word.mode:
                raise PolicyError(f"{spelling!r} means mode={word.mode!r}. Received: mode={mode!r}.")
            mode = mode or word.mode  # type: ignore[assignment]  # the dialects' table holds only the two modes
        settings = {"mode": mode, "float32_matmul": float32_matmul, "op_list": op_list}
        for name, value in settings.items():
            if value not in _CHOICES[name]:
                raise PolicyError(
                    f"{name} must be one of {_CHOICES[name]}. Received: {name}={value!r}."
                    + did_you_mean(str(value), [c for c in _CHOICES[name] if c])
                )
        given = {name: canonical(v, argument=name) for name, v in dtypes.items() if v is not None}
        values: dict[str, Any] = {
            "param": given.get("param", "float32"),
            "compute": given.get("compute", given.get("param", "float32")),
            "output": given.get("output", given.get("param", "float32")),
            "overrides": MappingProxyType(_checked_overrides(overrides or {})),
            "op_rules": MappingProxyType(_checked_rules(op_rules or {})),
            "aliases": MappingProxyType(alias_names.checked(aliases or {})),
            **settings,
        }
        for name, value in values.items():
            self._settle(name, value)
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if BYTES[self.param] < BYTES[self.compute] or (
            BYTES[self.param] == BYTES[self.compute] and self.param != self.compute
        ):
            wide = "float64" if self.compute == "float64" else "float32"
            raise PolicyError(
                f"param={self.param!r} cannot hold the master weights of compute={self.compute!r}: parameters must be "
                f"at least as wide as the computation, or of the same dtype. Use param={wide!r}."
            )

    def _key(self) -> tuple[Any, ...]:
        return tuple(_hashable(getattr(self, name)) for name in self.field_names)

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in ("param", "compute", "output")]
        for name, default in (("mode", None), ("float32_matmul", None), ("op_list", "polyamp")):
            if getattr(self, name) != default:
                shown.append(f"{name}={getattr(self, name)!r}")
        shown += [f"{name}={dict(getattr(self, name))!r}" for name in _TABLES if getattr(self, name)]
        return f"Policy({', '.join(shown)})"

    def __str__(self) -> str:
        """`repr`, and in words whether there are master weights: "fp16" is mixed, "float16" is not."""
        if self.param in ("float16", "bfloat16"):
            return f"{self!r} [pure: no float32 master weights]"
        return f"{self!r} [mixed: {self.param} master weights]" if self.is_mixed else repr(self)

    def to_dict(self) -> dict[str, Any]:
        """The policy's fields as plain data: `Policy(**policy.to_dict()) == policy`."""
        fields = super().to_dict()
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}

    @property
    def needs_loss_scaling(self) -> bool:
        """True when some of the model computes in float16 and its masters are wider (gradients underflow there)."""
        return self.param != "float16" and "float16" in (self.compute, *self.overrides.values())

    @classmethod
    def of(cls, policy: Policy | str) -> Policy:
        """A policy where it or its spelling is taken: what every function does that has a `policy` argument.

        Raises:
            PolicyError: neither.

        >>> Policy.of("mixed_float16").compute
        'float16'
        """
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, str):
            return cls(policy)
        hint = " Pass recipe.policy." if hasattr(policy, "policy") else ""
        raise PolicyError(f"policy must be a Policy or its spelling, 'mixed_float16'. Received: {policy!r}.{hint}")

    @property
    def is_mixed(self) -> bool:
        """True when anything is computed in another dtype than the parameters are stored in."""
        return any(dtype != self.param for dtype in (self.compute, self.output, *self.overrides.values()))

    def spelled(self, dialect: str) -> str:
        """The word for this policy in "keras", "lightning", "accelerate", "apex" or "jmp".

        Raises:
            PolicyError: the dialect has no word for it.

        >>> Policy("mixed_bfloat16").spelled("lightning")
        'bf16-mixed'
        """
        extras = [name for name, default in _EXTRAS if getattr(self, name) != default]
        if self.overrides:
            extras.append("overrides")
        return dialects.spell(
            dialects.Spelling(self.param, self.compute, self.output, self.mode), dialect, extras=extras
        )

    def dtype_at(self, path: str) -> str | None:
        """The dtype that the overrides give the module at `path`, or None where none applies (S5).

        >>> Policy("mixed_float16", overrides={"encoder/norm*": "float32"}).dtype_at("encoder/norm1")
        'float32'
        """
        return globs.dtype_at(self.overrides, path)

    def plan(self, paths: Iterable[str] | None = None, *, backend: str | None = None) -> Plan:
        """The policy resolved against a model, once: what each of its modules computes in (S3, S4, S5).

        Args:
            paths: the path of every module of the model, `/`-separated, "" for the model itself; None for what has no
                modules, such as a plain function.
            backend: whose spelling the paths have, for a policy with `aliases`.

        Raises:
            PolicyError: a glob of `overrides` matches none of `paths`; the message lists the nearest. Or an alias does
                not fit the paths, or the policy has some and no backend is named.

        >>> Policy("mixed_float16", overrides={"head": "float32"}).plan(["", "body", "head"]).at("head").dtype
        'float32'
        """
        return Plan(self, {} if paths is None else self.resolve_overrides(paths, backend=backend))

    def resolve_overrides(self, paths: Iterable[str], *, backend: str | None = None) -> dict[str, str]:
        """Module path -> dtype for every path that an override covers; arguments and errors as of `plan`."""
        if not self.overrides:
            return {}
        known = list(dict.fromkeys(paths))
        names = alias_names.named(self.aliases, backend, [(path,) for path in known])
        return globs.resolved(self.overrides, dict(zip(known, names, strict=True)))

    def autocast(self, target: Callable[..., Any], *, backend: str | None = None) -> Callable[..., Any]:
        """`target` (a function or a model) as a callable that runs under this policy; also a decorator.

        Args:
            target: a function, a method, a model or any callable.
            backend: the framework's name. By default that of `target` or, for a plain function, that of its first
                argument at the call which is an array of a framework. NumPy arrays leave it open: then it is the
                framework whose modules and arrays the function names, closes over or has as defaults.

        Raises:
            BackendError: none of these says it, or two contradict each other (when it is called).

        Example:
            >>> import numpy as np
            >>> def double(x):
            ...     return x + x
            >>> Policy("p=f32,c=f16,o=f16").autocast(double, backend="reference")(np.ones(2, np.float32)).dtype
            dtype('float16')
        """
        under: Callable[..., Any] = registry().autocast(target, self, backend)
        return under

    def native(self, backend: str) -> Any:
        """The framework's own object for this policy: a `torch.autocast` context, a `keras.DTypePolicy`, or in JAX a
        function transform."""
        return registry().supporting(registry().get(backend), self).native_policy(self)

    def cast_to_param(self, tree: _Target) -> _Target:
        """`tree` with its floating leaves in `param` dtype (S2: everything else passes untouched)."""
        return self._cast(tree, self.param)

    def cast_to_compute(self, tree: _Target) -> _Target:
        """`tree` with its floating leaves in `compute` dtype (S2: everything else passes untouched)."""
        return self._cast(tree, self.compute)

    def cast_to_output(self, tree: _Target) -> _Target:
        """`tree` with its floating leaves in `output` dtype (S2: everything else passes untouched)."""
        return self._cast(tree, self.output)

    @property
    def casts_float64(self) -> bool:
        """True when the policy names float64 itself; otherwise float64 leaves are never cast (S2)."""
        return "float64" in (self.param, self.compute, self.output)

    def _cast(self, tree: _Target, dtype: str) -> _Target:
        result: _Target = registry().backend_for(tree).cast(tree, dtype, float64=self.casts_float64)
        return result


def no_spelling(value: Any) -> str:
    """What to do with what is no spelling of a policy: "" or a sentence or two, a blank first."""
    if isinstance(value, int) and str(value) in dialects.WORDS["lightning"]:
        word = "16-mixed" if value == 16 else f"{value}-true"
        return f" Did you mean {word!r}?"
    if isinstance(value, Mapping):
        return " For fields by name: Policy(**fields)."
    if isinstance(value, type) and issubclass(value, Policy):
        return " Call it: Policy('mixed_float16')."
    dtype = name_of(value)
    if dtype in BYTES and dtype not in ("float32", "float64"):
        return (
            f" A dtype alone does not say what is stored in it: Policy('mixed_{dtype}') computes in {dtype} and keeps "
            f"float32 master weights, as Policy(compute={dtype!r}) does; Policy({dtype!r}) stores them in 16 bits too."
        )
    return f" Did you mean {dtype!r}?" if dtype in BYTES else ""


def _checked_overrides(overrides: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"overrides must map module-path globs to dtypes. Received: {overrides!r}.")
    checked = {}
    for glob, dtype in overrides.items():
        globs.check_glob(glob, argument="overrides: a key")
        checked[glob] = canonical(dtype, argument=f"overrides[{glob!r}]")
    return checked


def _checked_rules(op_rules: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(op_rules, Mapping):
        raise PolicyError(f"op_rules must map names of operations to rules. Received: {op_rules!r}.")
    for name, rule in op_rules.items():
        if rule not in _RULES:
            raise PolicyError(
                f"op_rules[{name!r}] must be one of {_RULES}. Received: {rule!r}." + did_you_mean(str(rule), _RULES)
            )
    return dict(op_rules)


def _hashable(value: Any) -> Any:
    return tuple(sorted((key, _hashable(item)) for key, item in value.items())) if isinstance(value, Mapping) else value
