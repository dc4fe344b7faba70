"""`Policy`: dtypes of parameters, computations and outputs (rules S1 to S5).

A policy is a frozen description and imports no framework. `policy.autocast`, `policy.native` and the `cast_to_*`
methods find the backend from their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Never, TypeVar

from polyamp import backend_lookup
from polyamp.errors import (
    BackendError,
    BackendNotInstalledError,
    PolicyError,
    PolyampError,
    UnsupportedError,
    describe_value,
    did_you_mean,
)
from polyamp.float_formats import FORMATS, HALF_DTYPES, canonical_dtype, framework_dtype_name
from polyamp.recipe import overrides as globs
from polyamp.recipe import path_aliases as alias_names
from polyamp.recipe import policy_names
from polyamp.recipe.float8 import FLOAT8_COMPUTE, FLOAT8_OVERRIDE, Float8, head_paths, parse_float8
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.records import Record, unknown_argument_error

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
    ("float8", None),
)
_TABLE_FIELDS: Final = ("overrides", "op_rules", "aliases")
_RULES: Final = ("compute", "float32", "promote", "follow", "opaque")
_Target = TypeVar("_Target")


class Policy(Record, kw_only=True):
    """Three dtypes and how they are applied.

    Args:
        spelling: a word of another library ("mixed_float16", "bf16-mixed", "fp16", "O2",
            "params=float32,compute=bf16,output=f32"); see `polyamp.recipe.policy_names`.
        param: dtype in which parameters are stored, the master weights.
        compute: dtype of matrix multiplications, convolutions and attention.
        output: dtype that the model returns.
        mode: "autocast" (each operation picks its dtype), "cast" (parameters and inputs are cast once at the
            model's boundary), or None for the backend's default.
        overrides: module-path glob -> dtype, `/`-separated in every framework; `*` stays inside one path segment,
            `**` crosses segments, and a glob that matches a module covers its submodules. The longest matching
            glob wins (of two equally long ones, the last in alphabetical order).
        float32_matmul: precision of float32 matrix multiplications on devices with a faster one (TF32): "highest",
            "high", "medium", or None to leave the framework's setting unchanged. In torch and TensorFlow the setting
            is process-wide: two threads with different values at the same time get an UnsupportedError.
        op_list: "polyamp" keeps sensitive operations in float32 in autocast mode (S4); "native" keeps the
            framework's own list.
        op_rules: operation name -> rule, to change an entry of the op list in autocast mode: "compute", "float32",
            "promote" (the widest dtype of its operands), "follow" (the operand's dtype) or "opaque" (the dtypes that
            the program declares). Names are the framework's: in JAX those of its primitives, in torch those of public
            functions ("softmax", "linear"), in Keras those of layers and operations, with "compute" or "float32".
        aliases: names for modules whose paths differ between frameworks, for use in `overrides`; usually passed to
            the `Recipe`, which uses them for parameter groups too.
        float8: a `Float8` for products of activations with parameters in 8 bits (S36), and bfloat16 for all else;
            "mixed_float8" has its defaults. An override with "bfloat16" takes a module out, one with "float8" puts a
            head in.

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
    float8: Float8 | None

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
        float8: Float8 | Mapping[str, Any] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise unknown_argument_error(Policy, list(unknown))
        dtypes = {"param": param, "compute": compute, "output": output}
        if isinstance(spelling, Policy):
            raise PolicyError("policy is already a Policy; use policy.replace(...) to change one of its fields.")
        if spelling is not None:
            if not isinstance(spelling, str):
                raise PolicyError(
                    f"policy must be a string such as 'mixed_float16'. Received: {spelling!r}.{spelling_hint(spelling)}"
                )
            doubled = [name for name, value in dtypes.items() if value is not None]
            if doubled:
                raise PolicyError(
                    f"{spelling!r} already settles {', '.join(doubled)}; give either the word or the dtypes."
                )
            word = policy_names.parse_spelling(spelling)
            dtypes = {"param": word.param, "compute": word.compute, "output": word.output}
            if mode is not None and word.mode is not None and mode != word.mode:
                raise PolicyError(f"{spelling!r} means mode={word.mode!r}. Received: mode={mode!r}.")
            float8 = Float8() if word.float8 and float8 is None else float8
            mode = mode or word.mode  # type: ignore[assignment]  # the dialects' table has only the two modes
        settings = {"mode": mode, "float32_matmul": float32_matmul, "op_list": op_list}
        for name, value in settings.items():
            if value not in _CHOICES[name]:
                raise PolicyError(
                    f"{name} must be one of {_CHOICES[name]}. Received: {name}={value!r}."
                    + did_you_mean(str(value), [c for c in _CHOICES[name] if c])
                )
        given = {name: canonical_dtype(v, argument=name) for name, v in dtypes.items() if v is not None}
        values: dict[str, Any] = {
            "param": given.get("param", "float32"),
            "compute": given.get("compute", given.get("param", "float32")),
            "output": given.get("output", given.get("param", "float32")),
            "overrides": MappingProxyType(_parse_overrides(overrides or {})),
            "op_rules": MappingProxyType(_parse_rules(op_rules or {})),
            "aliases": MappingProxyType(alias_names.parse_aliases(aliases or {})),
            "float8": parse_float8(float8),
            **settings,
        }
        for name, value in values.items():
            self._set_field(name, value)
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if FORMATS[self.param].bits < FORMATS[self.compute].bits or (
            FORMATS[self.param].bits == FORMATS[self.compute].bits and self.param != self.compute
        ):
            wide = "float64" if self.compute == "float64" else "float32"
            raise PolicyError(
                f"param={self.param!r} cannot hold the master weights of compute={self.compute!r}: parameters must be "
                f"at least as wide as the computation, or of the same dtype. Use param={wide!r}."
            )
        if self.float8 is None:
            named = [glob for glob, dtype in self.overrides.items() if dtype == FLOAT8_OVERRIDE]
            if named:
                raise PolicyError(
                    f"overrides[{named[0]!r}] is 'float8', and the policy has no products in 8 bits. Use "
                    "Policy('mixed_float8', ...)."
                )
        elif (self.param, self.compute) != ("float32", FLOAT8_COMPUTE) or self.mode == "cast":
            raise PolicyError(
                f"float8 needs param='float32', compute={FLOAT8_COMPUTE!r} and mode='autocast', where each operation "
                f"has its dtype. Received: param={self.param!r}, compute={self.compute!r}, mode={self.mode!r}."
            )

    def _key(self) -> tuple[Any, ...]:
        return tuple(_to_hashable(getattr(self, name)) for name in self.field_names)

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in ("param", "compute", "output")]
        for name, default in (("mode", None), ("float32_matmul", None), ("op_list", "polyamp")):
            if getattr(self, name) != default:
                shown.append(f"{name}={getattr(self, name)!r}")
        shown += [] if self.float8 is None else [f"float8={self.float8!r}"]
        shown += [f"{name}={dict(getattr(self, name))!r}" for name in _TABLE_FIELDS if getattr(self, name)]
        return f"Policy({', '.join(shown)})"

    def __str__(self) -> str:
        """Return `repr`, and in words whether there are master weights: "fp16" is mixed, "float16" is not."""
        if self.param in HALF_DTYPES:
            return f"{self!r} [pure: no float32 master weights]"
        return f"{self!r} [mixed: {self.param} master weights]" if self.is_mixed else repr(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the policy's fields as plain data: `Policy(**policy.to_dict()) == policy`."""
        fields = super().to_dict()
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
        return plain if self.float8 is None else {**plain, "float8": self.float8.to_dict()}

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether part of the model computes in float16 with wider master weights, where gradients may underflow."""
        computed = (self.compute, *self._override_dtypes())
        return not FORMATS[self.param].needs_scale and any(FORMATS[dtype].needs_scale for dtype in computed)

    @classmethod
    def of(cls, policy: Policy | str, call: str = "") -> Policy:
        """Return a policy from a policy or its spelling, as every function with a `policy` argument does.

        Args:
            policy: the policy, or its spelling.
            call: how the caller is written, for the message: "explain(loss_fn, policy, model, batch)".

        Raises:
            PolicyError: the value is neither.

        >>> Policy.of("mixed_float16").compute
        'float16'
        """
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, str):
            return cls(policy)
        hint = " Pass recipe.policy." if isinstance(getattr(policy, "policy", None), cls) else ""
        hint = hint or (f" Write {call}." if call else "")
        raise PolicyError(
            f"policy must be a Policy or its spelling, 'mixed_float16'. Received: {describe_value(policy)}.{hint}"
        )

    @property
    def is_mixed(self) -> bool:
        """Whether any computation has another dtype than the stored parameters."""
        return any(dtype != self.param for dtype in (self.compute, self.output, *self._override_dtypes()))

    def _override_dtypes(self) -> list[str]:
        return [FLOAT8_COMPUTE if dtype == FLOAT8_OVERRIDE else dtype for dtype in self.overrides.values()]

    def spelled(self, dialect: str) -> str:
        """Return the word for this policy in "keras", "lightning", "accelerate", "apex" or "jmp".

        Raises:
            PolicyError: the dialect has no word for it.

        >>> Policy("mixed_bfloat16").spelled("lightning")
        'bf16-mixed'
        """
        extras = [name for name, default in _EXTRAS if getattr(self, name) != default]
        if self.overrides:
            extras.append("overrides")
        return policy_names.spell_policy(
            policy_names.PolicySpelling(self.param, self.compute, self.output, self.mode), dialect, extras=extras
        )

    def dtype_at(self, path: str) -> str | None:
        """Return the dtype that the overrides give the module at `path`, or None if none applies (S5).

        >>> Policy("mixed_float16", overrides={"encoder/norm*": "float32"}).dtype_at("encoder/norm1")
        'float32'
        """
        return globs.dtype_at(self.overrides, path)

    def plan(self, paths: Iterable[str] | None = None, *, backend: str | None = None) -> ResolvedPolicy:
        """Resolve the policy once against a model: the compute dtype of each of its modules (S3, S4, S5).

        Args:
            paths: the path of every module of the model, `/`-separated, "" for the model itself; None for a target
                without modules, such as a plain function.
            backend: backend whose spelling the paths have, for a policy with `aliases`.

        Raises:
            PolicyError: a glob of `overrides` matches none of `paths` (lists the closest), an alias does not match the
                paths, or the policy has aliases and no backend is named.

        >>> Policy("mixed_float16", overrides={"head": "float32"}).plan(["", "body", "head"]).at("head").dtype
        'float32'
        """
        return ResolvedPolicy(self, {} if paths is None else self.resolve_overrides(paths, backend=backend))

    def resolve_overrides(self, paths: Iterable[str], *, backend: str | None = None) -> dict[str, str]:
        """Return module path -> dtype for every path that an override covers; arguments and errors as in `plan`.

        Under a policy with `float8`, heads without an override stay in the compute dtype (S36).
        """
        if not self.overrides and self.float8 is None:
            return {}
        known = list(dict.fromkeys(paths))
        heads = {} if self.float8 is None else dict.fromkeys(head_paths(known), self.compute)
        if not self.overrides:
            return heads
        names = alias_names.expand_aliases(self.aliases, backend, [(path,) for path in known])
        return heads | globs.resolve_overrides(self.overrides, dict(zip(known, names, strict=True)))

    @property
    def has_module_precisions(self) -> bool:
        """Whether modules of a model may differ in precision: by `overrides`, or because heads stay in 16 bits."""
        return bool(self.overrides) or self.float8 is not None

    def autocast(self, target: Callable[..., Any], *, backend: str | None = None) -> Callable[..., Any]:
        """Wrap `target`, a function or a model, in a callable that runs under this policy. Also a decorator.

        Args:
            target: a function, a method, a model or any callable.
            backend: the framework's name. By default that of `target` or, for a plain function, that of its first
                argument at the call that is an array of a framework. NumPy arrays do not decide: then it is the
                framework of the modules and arrays that the function names, closes over or has as defaults.

        Raises:
            BackendError: at the call, if none of these determines the framework, or two contradict each other.

        Example:
            >>> import numpy as np
            >>> def double(x):
            ...     return x + x
            >>> Policy("p=f32,c=f16,o=f16").autocast(double, backend="reference")(np.ones(2, np.float32)).dtype
            dtype('float16')
        """
        chosen: Any = None
        if backend is not None:
            chosen = backend_lookup.get(backend)
        else:
            try:
                chosen = backend_lookup.backend_for(target)
            except BackendNotInstalledError:
                raise
            except BackendError:
                if not callable(target):
                    raise
        if chosen is not None:
            under: Callable[..., Any] = check_supported(chosen, self).autocast(target, self)
            return under
        own = functools.cache(lambda: backend_lookup.backend_of_function(target))

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            found = backend_lookup.backend_of_values((*args, *kwargs.values())) or own()
            return check_supported(found, self).autocast(target, self)(*args, **kwargs)

        return call

    def native(self, backend: str) -> Any:
        """Return the framework's own object for this policy: a `torch.autocast` context, a `keras.DTypePolicy`, or in
        JAX a function transform."""
        return check_supported(backend_lookup.get(backend), self).native_policy(self)

    def cast_to_param(self, tree: _Target) -> _Target:
        """Return `tree` with its floating leaves in `param` dtype (S2: all other leaves are unchanged)."""
        return self._cast(tree, self.param)

    def cast_to_compute(self, tree: _Target) -> _Target:
        """Return `tree` with its floating leaves in `compute` dtype (S2: all other leaves are unchanged)."""
        return self._cast(tree, self.compute)

    def cast_to_output(self, tree: _Target) -> _Target:
        """Return `tree` with its floating leaves in `output` dtype (S2: all other leaves are unchanged)."""
        return self._cast(tree, self.output)

    @property
    def casts_float64(self) -> bool:
        """Whether the policy names float64 itself; otherwise float64 leaves are never cast (S2)."""
        return "float64" in (self.param, self.compute, self.output)

    def _cast(self, tree: _Target, dtype: str) -> _Target:
        result: _Target = backend_lookup.backend_for(tree).cast(tree, dtype, float64=self.casts_float64)
        return result


def check_supported(backend: Any, policy: Policy) -> Any:
    """Return the backend, if it supports the policy's settings other than dtypes.

    Raises:
        UnsupportedError: `op_rules`, on a backend without rules per operation; `float8`, on one without products in 8
            bits.
    """
    if policy.float8 is not None and not hasattr(backend, "has_float8_products"):
        raise UnsupportedError(
            f"the {backend.name} backend of this version has no products in 8 bits (S36). "
            "Use Policy('mixed_bfloat16') here."
        )
    if policy.op_rules and not hasattr(backend, "changes_op_rules"):
        raise UnsupportedError(
            f"the {backend.name} backend of this version cannot change the rule of one operation. Received: op_rules="
            f"{dict(policy.op_rules)}. Use policy.replace(op_rules={{}}), and overrides= to keep a module in float32."
        )
    return backend


def spelling_hint(value: Any) -> str:
    """Return a hint for a value that is no spelling: "" or one or two sentences with a leading space."""
    if isinstance(value, int) and str(value) in policy_names.DIALECTS["lightning"]:
        word = "16-mixed" if value == 16 else f"{value}-true"
        return f" Did you mean {word!r}?"
    if isinstance(value, Mapping):
        return " For fields by name: Policy(**fields)."
    if isinstance(value, type) and issubclass(value, Policy):
        return " Call it: Policy('mixed_float16')."
    dtype = framework_dtype_name(value)
    if dtype in HALF_DTYPES:
        return (
            f" A dtype alone does not say what is stored in it: Policy('mixed_{dtype}') computes in {dtype} and keeps "
            f"float32 master weights, as Policy(compute={dtype!r}) does; Policy({dtype!r}) stores them in 16 bits too."
        )
    return f" Did you mean {dtype!r}?" if dtype in FORMATS else ""


def _parse_overrides(overrides: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"overrides must map module-path globs to dtypes. Received: {overrides!r}.")
    checked = {}
    for glob, dtype in overrides.items():
        globs.check_glob(glob, argument="overrides: a key")
        is_float8 = dtype == FLOAT8_OVERRIDE
        checked[glob] = FLOAT8_OVERRIDE if is_float8 else canonical_dtype(dtype, argument=f"overrides[{glob!r}]")
    return checked


def _parse_rules(op_rules: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(op_rules, Mapping):
        raise PolicyError(f"op_rules must map names of operations to rules. Received: {op_rules!r}.")
    for name, rule in op_rules.items():
        if rule not in _RULES:
            raise PolicyError(
                f"op_rules[{name!r}] must be one of {_RULES}. Received: {rule!r}." + did_you_mean(str(rule), _RULES)
            )
    return dict(op_rules)


def _to_hashable(value: Any) -> Any:
    return (
        tuple(sorted((key, _to_hashable(item)) for key, item in value.items())) if isinstance(value, Mapping) else value
    )
