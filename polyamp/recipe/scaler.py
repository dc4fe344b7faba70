"""`LossScaler`, the frozen description of loss scaling, and `LossScaleState`, the state that its rule S15 moves.

    next_state(state, finite):
        if finite:
            good = state.good_steps + 1
            if good >= growth_interval + late:
                scale, good, hysteresis = min(scale * growth_factor, max_scale), again, initial
            stuck = 0
        else:
            good, hysteresis, skipped = 0, hysteresis - 1, skipped + 1
            if hysteresis <= 0: scale = max(scale * backoff_factor, min_scale)
            stuck = stuck + 1 if scale == min_scale else 0

    late, again = {"none": (0, 0), "after_overflow": (1, 1), "always": (1, 0)}[growth_delay]

`>=`, because a run may continue with a smaller `growth_interval` than it began with.

Source of the technique: Micikevicius et al., "Mixed Precision Training", 2018 (arxiv.org/abs/1710.03740).
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal, NamedTuple

from polyamp import backend_lookup
from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import (
    ArgumentError,
    LossScaleError,
    PolyampError,
    UnsupportedError,
    describe_value,
    did_you_mean,
)
from polyamp.recipe.policy import Policy
from polyamp.records import Record

OnStuck = Literal["raise", "warn", "ignore"]
GrowthDelay = Literal["none", "after_overflow", "always"]
NO_CEILING: Final = 2.0**127
"""Largest power of two in float32: the maximum scale of presets whose source has none (S17 still applies)."""
GROWTH_DELAYS: Final = {"none": (0, 0), "after_overflow": (1, 1), "always": (1, 0)}
"""Growth delay -> (extra finite steps before the first growth, value at which the count restarts after a growth)."""
_LARGEST_PRODUCT: Final = 1.5 * NO_CEILING
"""Above every maximum scale and finite in float32. Growth is clamped to it, so it never overflows or warns in NumPy."""


class LossScaleState(NamedTuple):
    """State of a loss scale: five scalar arrays of the framework, a pytree in every framework.

    Attributes:
        scale: float32 scalar, the factor that the next loss is multiplied by.
        good_steps: int32 scalar, finite steps since the last growth or overflow (with `growth_delay="after_overflow"`,
            one more after a growth).
        hysteresis: int32 scalar, overflows still tolerated before the scale backs off.
        skipped: int32 scalar, steps skipped since `init`.
        stuck: int32 scalar, consecutive skips at `min_scale`.
    """

    scale: Any
    good_steps: Any
    hysteresis: Any
    skipped: Any
    stuck: Any


class LossScaler(Record, kw_only=True):
    """Frozen description of loss scaling. Its methods are pure and take the framework's own arrays.

    Args:
        kind: "dynamic", "static" (the scale never moves, overflowing steps are skipped) or "off".
        init_scale: initial scale, a float32 factor.
        growth_factor: factor of the scale after `growth_interval` consecutive finite steps.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: consecutive finite steps before the scale grows.
        hysteresis: overflows before the scale backs off (1: at the first). It is reset when the scale grows.
        consecutive_hysteresis: reset `hysteresis` at every finite step (DeepSpeed's `consecutive_hysteresis`).
        growth_delay: "none"; "after_overflow": the scale grows one finite step later the first time and after each
            overflow (DeepSpeed); "always": one step later every time (flax's `DynamicScale`).
        min_scale: minimum of the scale; never 0 (S17).
        max_scale: maximum of the scale; never inf.
        patience: consecutive skips at `min_scale` before `on_stuck`; the host checks every `patience` steps (S17).
        on_stuck: "raise" `LossScaleStuckError`, "warn", or "ignore".
        check_finite: with kind="off", skip steps whose gradients are not finite. The other kinds always check.

    Raises:
        LossScaleError: an impossible value.

    Example:
        >>> scaler = LossScaler(init_scale=16.0, growth_interval=4)
        >>> state = scaler.init("reference")
        >>> float(scaler.update(state, finite=False).scale)
        8.0
    """

    word: ClassVar[str] = "scaler"
    error: ClassVar[type[PolyampError]] = LossScaleError

    kind: Literal["dynamic", "static", "off"] = "dynamic"
    init_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    growth_delay: GrowthDelay = "none"
    patience: int = 50
    on_stuck: OnStuck = "raise"
    check_finite: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("dynamic", "static", "off"):
            none = " Did you mean 'off'?" if self.kind in ("none", None, False) else ""
            raise LossScaleError(f"kind must be 'dynamic', 'static' or 'off'. Received: kind={self.kind!r}.{none}")
        if self.on_stuck not in ("raise", "warn", "ignore"):
            raise LossScaleError(f"on_stuck must be 'raise', 'warn' or 'ignore'. Received: on_stuck={self.on_stuck!r}.")
        if self.growth_delay not in GROWTH_DELAYS:
            raise LossScaleError(
                "growth_delay must be 'none', 'after_overflow' or 'always'. Received: "
                f"growth_delay={self.growth_delay!r}."
            )
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            self._set_field(name, _check_positive(name, getattr(self, name)))
        for name in ("growth_interval", "hysteresis", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31 - 1:
                raise LossScaleError(f"{name} must be an integer of at least 1. Received: {name}={value!r}.")
        if self.kind != "dynamic":
            pinned = 1.0 if self.kind == "off" else self.init_scale
            for name in ("init_scale", "min_scale", "max_scale"):
                self._set_field(name, pinned)
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise LossScaleError(
                "init_scale must lie between min_scale and max_scale. Received: "
                f"min_scale={self.min_scale}, init_scale={self.init_scale}, max_scale={self.max_scale}."
            )
        if self.growth_factor < 1.0:
            raise LossScaleError(f"growth_factor must be at least 1. Received: growth_factor={self.growth_factor}.")
        if self.backoff_factor > 1.0:
            raise LossScaleError(f"backoff_factor must be at most 1. Received: backoff_factor={self.backoff_factor}.")
        if self.check_finite and self.kind != "off":
            raise LossScaleError(f"check_finite is for kind='off'; kind={self.kind!r} always checks. Drop it.")

    def _init_arguments(self) -> dict[str, Any]:
        """Return the fields except those that `kind` determines, which `repr` and `replace` omit."""
        settled = {"dynamic": (), "static": ("min_scale", "max_scale"), "off": ("init_scale", "min_scale", "max_scale")}
        return {name: value for name, value in self.to_dict().items() if name not in settled[self.kind]}

    @classmethod
    def static(cls, scale: float, **settings: Any) -> LossScaler:
        """Return a scaler whose scale is constant. A step whose gradients overflow is still skipped.

        >>> LossScaler.static(1024.0).max_scale
        1024.0
        """
        return cls(kind="static", init_scale=scale, **settings)

    @classmethod
    def off(cls, *, check_finite: bool = False) -> LossScaler:
        """Return a scaler without scaling and, unless `check_finite`, without a finite check: plain code (S19)."""
        return cls(kind="off", check_finite=check_finite)

    @classmethod
    def like(cls, name: str, **changes: Any) -> LossScaler:
        """Return a preset: "torch", "keras", "apex", "deepspeed", "megatron", "jmp" or "flax".

        For the same finite flags and constants, the scale after each step equals the source's (S16) within `min_scale`
        and `max_scale`. If the source has no minimum or maximum, polyamp's minimum of 2^-14 and a maximum of 2^127
        apply (S17). "deepspeed" is its `DynamicLossScaler` (ZeRO), which raises at the first overflow at the minimum,
        where polyamp waits for `patience`. DeepSpeed's `FP16_Optimizer` ignores hysteresis:
        `like("deepspeed", hysteresis=1)`.

        >>> LossScaler.like("megatron").hysteresis
        2
        """
        if name not in PRESETS:
            raise LossScaleError(f"like() knows {', '.join(PRESETS)}. Received: {name!r}.{did_you_mean(name, PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def for_policy(cls, policy: Policy | str) -> LossScaler:
        """Return a policy's default scaler: dynamic for float16 computation with wider master weights, else off."""
        return cls() if Policy.of(policy).needs_loss_scaling else cls.off()

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled: `kind` is not "off"."""
        return self.kind != "off"

    @property
    def checks(self) -> bool:
        """Whether a step with non-finite gradients is skipped."""
        return self.kind != "off" or self.check_finite

    def init(self, backend: str | None = None, *, like: Any = None) -> LossScaleState:
        """Return a fresh state, created anew at every call (S18).

        Args:
            backend: a backend's name; or
            like: any array of the framework, whose device the state is placed on.
        """
        if (backend is None) == (like is None):
            raise LossScaleError("init() takes either a backend's name, or like=array. Received: both or neither.")
        found = backend_lookup.get(backend) if backend is not None else backend_lookup.backend_for(like)
        return LossScaleState(
            scale=found.scalar(self.init_scale, "float32", like=like),
            good_steps=found.scalar(0, "int32", like=like),
            hysteresis=found.scalar(self.hysteresis, "int32", like=like),
            skipped=found.scalar(0, "int32", like=like),
            stuck=found.scalar(0, "int32", like=like),
        )

    def scale(self, loss: Any, state: LossScaleState) -> Any:
        """Return the loss in float32, multiplied by the scale (S6); unchanged if scaling is off.

        Raises:
            LossError: the loss is not a floating scalar.
        """
        _check_state(state, "scaler.scale(loss, state)")
        return backend_lookup.backend_for(state.scale).scale_loss(loss, state.scale if self.scales else None)

    def unscale(self, grads: Any, state: LossScaleState) -> tuple[Any, Any]:
        """Return gradients of the unscaled loss in float32, and the finite flag: a boolean device scalar (S7, S10).

        It always divides by the scale: like `scale`, it is stateless and cannot detect a missing or a repeated call.
        The scalers for custom loops detect a missing call: `polyamp_torch.GradScaler`,
        `polyamp_tensorflow.LossScaleOptimizer`.

        If the flag is False, apply nothing, or parameters and moments become NaN: torch
        `if finite: optimizer.step()`, Keras `tf.cond(finite, lambda: optimizer.apply(grads), lambda: None)`, JAX
        `params, opt_state = polyamp_jax.select(finite, (new_params, new_opt_state), (params, opt_state))`.

        Args:
            grads: a list, dict or pytree of the framework's arrays. `None` leaves stay `None`.

        Raises:
            GradientError: there is no floating gradient.
        """
        _check_state(state, "scaler.unscale(grads, state)")
        found: tuple[Any, Any] = backend_lookup.backend_for(state.scale).unscale(
            grads, state.scale if self.scales else None
        )
        return found

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Return the next state by rule S15.

        Args:
            finite: the flag from `unscale`: a boolean scalar of the same framework, or a Python bool.
        """
        _check_state(state, "scaler.update(state, finite)")
        return self.next_state(state, finite, backend_lookup.backend_for(state.scale).xp)

    def next_state(self, state: LossScaleState, finite: Any, xp: ArrayNamespace) -> LossScaleState:
        """Return the next state by rule S15 over an array namespace.

        Branch-free, so it runs on the device and under every compiler.
        """
        scale, count = state.scale, state.good_steps
        if type(finite).__module__ in ("builtins", "numpy"):
            finite = xp.asarray(bool(finite), scale > 0)

        def number(value: float, like: Any) -> Any:
            return xp.asarray(value, like)

        zero, full = number(0, count), number(self.hysteresis, count)
        good = state.good_steps + number(1, count)
        late, again = GROWTH_DELAYS[self.growth_delay]
        grow = finite & (good >= number(self.growth_interval + late, count))
        left = xp.maximum(state.hysteresis - number(1, count), number(-1, count))
        refill = finite if self.consecutive_hysteresis else grow
        hysteresis = xp.where(refill, full, xp.where(finite, state.hysteresis, left))
        base = xp.minimum(scale, number(_LARGEST_PRODUCT / self.growth_factor, scale))
        grown = xp.minimum(base * number(self.growth_factor, scale), number(self.max_scale, scale))
        backed = xp.maximum(scale * number(self.backoff_factor, scale), number(self.min_scale, scale))
        overflowed = xp.where(left <= zero, backed, scale)
        new_scale = xp.where(finite, xp.where(grow, grown, scale), overflowed)
        at_floor = new_scale == number(self.min_scale, scale)
        return LossScaleState(
            scale=new_scale,
            good_steps=xp.where(finite, xp.where(grow, number(again, count), good), zero),
            hysteresis=hysteresis,
            skipped=xp.where(finite, state.skipped, state.skipped + number(1, count)),
            stuck=xp.where(finite, zero, xp.where(at_floor, state.stuck + number(1, count), zero)),
        )

    def native(self, backend: str, **options: Any) -> Any:
        """Return the framework's own object for this scaler: a `torch.amp.GradScaler`, or in JAX a function transform.

        Args:
            backend: the backend's name.
            **options: options of that object, such as `skip=` in torch and `has_aux=` in JAX.

        Raises:
            UnsupportedError: the backend has no such object.
        """
        found = backend_lookup.get(backend)
        if not hasattr(found, "native_scaler"):
            raise UnsupportedError(
                f"the {backend} backend of this version has no loss-scaling object of its own. Use scaler.scale, "
                "scaler.unscale and scaler.update, which take its arrays."
            )
        return found.native_scaler(self, **options)


def _check_state(state: Any, call: str) -> None:
    if not hasattr(state, "scale"):
        raise ArgumentError(
            f"{call}: state must be a LossScaleState, what scaler.init(...) returned. Received: "
            f"{describe_value(state)}. Are the arguments swapped?"
        )


def _check_positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        dynamic = value == "dynamic"
        instead = " One that moves is LossScaler(), the default: it starts at init_scale=2.0**15." if dynamic else ""
        raise LossScaleError(f"{name} must be a number. Received: {name}={value!r}.{instead}")
    if not 2.0**-126 <= value <= NO_CEILING:
        raise LossScaleError(f"{name} must be a positive float32 number, 2^-126 to 2^127. Received: {name}={value!r}.")
    return float(value)


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "torch": {"init_scale": 2.0**16, "growth_interval": 2000, "max_scale": NO_CEILING},
    "keras": {"init_scale": 2.0**15, "growth_interval": 2000, "max_scale": NO_CEILING},
    "apex": {"init_scale": 2.0**16, "growth_interval": 2000, "max_scale": 2.0**24},
    "deepspeed": {"init_scale": 2.0**16, "growth_interval": 1000, "hysteresis": 2, "min_scale": 1.0,
                  "max_scale": NO_CEILING, "growth_delay": "after_overflow"},
    "megatron": {"init_scale": 2.0**32, "growth_interval": 1000, "hysteresis": 2, "min_scale": 1.0,
                 "max_scale": NO_CEILING},
    "jmp": {"init_scale": 2.0**15, "growth_interval": 2000, "min_scale": 1.0, "max_scale": NO_CEILING},
    "flax": {"init_scale": 2.0**16, "growth_interval": 2000, "min_scale": 2.0**-126, "max_scale": NO_CEILING,
             "growth_delay": "always"},
}  # fmt: skip
"""Published constants: torch.amp.GradScaler, keras.optimizers.LossScaleOptimizer, apex.amp.scaler.LossScaler,
DeepSpeed's `fp16` block, Megatron-LM's `--initial-loss-scale` family, jmp.DynamicLossScale with its README's scale,
flax.training.dynamic_scale.DynamicScale."""
