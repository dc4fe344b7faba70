"""`LossScaler`: a frozen description of how the loss is scaled. Its rule (S15) is `rules.scale`.

Source of the technique: Micikevicius et al., "Mixed Precision Training", 2018 (arxiv.org/abs/1710.03740).
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from polyamp.errors import ArgumentError, LossScaleError, PolyampError, described, did_you_mean
from polyamp.lookup import registry
from polyamp.recipe.policy import Policy
from polyamp.records import Record
from polyamp.rules.scale import DELAYS, NO_CEILING, LossScaleState, update

OnStuck = Literal["raise", "warn", "ignore"]
GrowthDelay = Literal["none", "after_overflow", "always"]


class LossScaler(Record, kw_only=True):
    """A frozen description of how the loss is scaled; its methods are pure and take the framework's own arrays.

    Args:
        kind: "dynamic", "static" (the scale never moves, overflowing steps are skipped) or "off".
        init_scale: first scale, a float32 factor.
        growth_factor: the scale is multiplied by this after `growth_interval` finite steps in a row.
        backoff_factor: the scale is multiplied by this on an overflow.
        growth_interval: finite steps in a row before the scale grows.
        hysteresis: overflows before the scale backs off (1: at the first). It is refilled when the scale grows.
        consecutive_hysteresis: refill `hysteresis` at every finite step (DeepSpeed's `consecutive_hysteresis`).
        growth_delay: "none"; "after_overflow": the scale grows one finite step later the first time and after each
            overflow (DeepSpeed); "always": one step later every time (flax's `DynamicScale`).
        min_scale: floor of the scale; never 0 (S17).
        max_scale: ceiling of the scale; never inf.
        patience: consecutive skips at `min_scale` before `on_stuck`; the host looks every `patience` steps (S17).
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
        if self.growth_delay not in DELAYS:
            raise LossScaleError(
                "growth_delay must be 'none', 'after_overflow' or 'always'. Received: "
                f"growth_delay={self.growth_delay!r}."
            )
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            self._settle(name, _positive(name, getattr(self, name)))
        for name in ("growth_interval", "hysteresis", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31 - 1:
                raise LossScaleError(f"{name} must be an integer of at least 1. Received: {name}={value!r}.")
        if self.kind != "dynamic":
            pinned = 1.0 if self.kind == "off" else self.init_scale
            for name in ("init_scale", "min_scale", "max_scale"):
                self._settle(name, pinned)
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

    def _given(self) -> dict[str, Any]:
        """The fields, less those that `kind` settles: neither `repr` shows them, nor does `replace` hand them on."""
        settled = {"dynamic": (), "static": ("min_scale", "max_scale"), "off": ("init_scale", "min_scale", "max_scale")}
        return {name: value for name, value in self.to_dict().items() if name not in settled[self.kind]}

    @classmethod
    def static(cls, scale: float, **settings: Any) -> LossScaler:
        """A scale that never moves; a step whose gradients overflow is still skipped.

        >>> LossScaler.static(1024.0).max_scale
        1024.0
        """
        return cls(kind="static", init_scale=scale, **settings)

    @classmethod
    def off(cls, *, check_finite: bool = False) -> LossScaler:
        """No scaling and, unless `check_finite`, no finite check: the results of plain code (S19)."""
        return cls(kind="off", check_finite=check_finite)

    @classmethod
    def like(cls, name: str, **changes: Any) -> LossScaler:
        """The scales and constants of "torch", "keras", "apex", "deepspeed", "megatron", "jmp" or "flax".

        The scale after each step is the source's, for the same finite flags and constants (S16), as long as it lies
        within `min_scale` and `max_scale`: where the source has no floor or no ceiling, polyamp's floor of 2^-14 and a
        ceiling of 2^127 apply (S17). "deepspeed" is its `DynamicLossScaler` (ZeRO), which raises at the first overflow
        at the floor where polyamp waits for `patience`; its `FP16_Optimizer` ignores hysteresis:
        `like("deepspeed", hysteresis=1)`.

        >>> LossScaler.like("megatron").hysteresis
        2
        """
        if name not in PRESETS:
            raise LossScaleError(f"like() knows {', '.join(PRESETS)}. Received: {name!r}.{did_you_mean(name, PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def for_policy(cls, policy: Policy | str) -> LossScaler:
        """The scaler a policy needs: dynamic where something computes in float16 under wider masters, else off."""
        return cls() if Policy.of(policy).needs_loss_scaling else cls.off()

    @property
    def scales(self) -> bool:
        """True unless kind is "off"."""
        return self.kind != "off"

    @property
    def checks(self) -> bool:
        """True when a step with non-finite gradients is skipped."""
        return self.kind != "off" or self.check_finite

    def init(self, backend: str | None = None, *, like: Any = None) -> LossScaleState:
        """A fresh state, built anew at every call (S18).

        Args:
            backend: a backend's name; or
            like: any array of the framework, whose device the state goes to.
        """
        if (backend is None) == (like is None):
            raise LossScaleError("init() takes either a backend's name, or like=array. Received: both or neither.")
        found = registry().get(backend) if backend is not None else registry().backend_for(like)
        return LossScaleState(
            scale=found.scalar(self.init_scale, "float32", like=like),
            good_steps=found.scalar(0, "int32", like=like),
            hysteresis=found.scalar(self.hysteresis, "int32", like=like),
            skipped=found.scalar(0, "int32", like=like),
            stuck=found.scalar(0, "int32", like=like),
        )

    def scale(self, loss: Any, state: LossScaleState) -> Any:
        """The loss, upcast to float32 and multiplied by the scale (S6); as it is when scaling is off.

        Raises:
            LossError: the loss is not a floating scalar.
        """
        _check_state(state, "scaler.scale(loss, state)")
        return registry().backend_for(state.scale).scale_loss(loss, state.scale if self.scales else None)

    def unscale(self, grads: Any, state: LossScaleState) -> tuple[Any, Any]:
        """Gradients of the unscaled loss in float32, and the finite flag (S7, S10): one boolean scalar on the device.

        It divides by the scale whatever it is given: like `scale`, it sees values and keeps no books, so a call that
        was forgotten, or made twice, is not noticed here. The scalers for loops of one's own notice a forgotten one:
        `polyamp_torch.GradScaler`, `polyamp_tensorflow.LossScaleOptimizer`.

        Where the flag is False, nothing may be applied, or parameters and moments become NaN: torch
        `if finite: optimizer.step()`, Keras `tf.cond(finite, lambda: optimizer.apply(grads), lambda: None)`, JAX
        `params, opt_state = polyamp_jax.select(finite, (new_params, new_opt_state), (params, opt_state))`.

        Args:
            grads: a list, dict or pytree of the framework's arrays. `None` leaves stay `None`.

        Raises:
            GradientError: there is no floating gradient.
        """
        _check_state(state, "scaler.unscale(grads, state)")
        found: tuple[Any, Any] = (
            registry().backend_for(state.scale).unscale(grads, state.scale if self.scales else None)
        )
        return found

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """The next state by rule S15.

        Args:
            finite: the flag that `unscale` returned: a boolean scalar of the same framework, or a Python bool.
        """
        _check_state(state, "scaler.update(state, finite)")
        return update(self, state, finite, registry().backend_for(state.scale).xp)

    def native(self, backend: str, **options: Any) -> Any:
        """The framework's own object for this scaler: a `torch.amp.GradScaler`, or in JAX a function transform.

        Args:
            backend: its name.
            **options: what that object takes, such as `skip=` in torch and `has_aux=` in JAX.

        Raises:
            UnsupportedError: the backend has no such object.
        """
        return registry().native_scaler(backend, self, **options)


def _check_state(state: Any, call: str) -> None:
    if not hasattr(state, "scale"):
        raise ArgumentError(
            f"{call}: state must be a LossScaleState, what scaler.init(...) returned. Received: {described(state)}. "
            "Are the arguments swapped?"
        )


def _positive(name: str, value: Any) -> float:
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
