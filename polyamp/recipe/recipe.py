"""`Recipe`: policy, scaler, optimizer, clipping and accumulation in one frozen object, with TOML and JSON formats."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from polyamp.errors import (
    LossScaleError,
    PolyampError,
    RecipeError,
    closest_words,
    describe_value,
    did_you_mean,
    plain_number_hint,
)
from polyamp.recipe.clip_limits import ClipLimits, check_clip_limits
from polyamp.recipe.ema import Ema
from polyamp.recipe.optimizer_formulas.adam import AdamW
from polyamp.recipe.optimizers import SPECS, OptimizerSpec, is_spec
from polyamp.recipe.policy import Policy, spelling_hint
from polyamp.recipe.scaler import PRESETS, LossScaler
from polyamp.records import Record

if TYPE_CHECKING:
    AnyOptimizer = Any  # a spec, or a framework's own optimizer
else:
    AnyOptimizer = OptimizerSpec  # the types that a file can store

if TYPE_CHECKING:
    from pathlib import Path

SPEC_NAMES: tuple[str, ...] = tuple(spec.called() for spec in SPECS)
_NON_OPTIMIZER_TYPES = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type,
    types.FunctionType,
    types.MethodType,
    functools.partial,
)


class Recipe(Record, kw_only=True):
    """Everything about a training step that does not depend on the framework.

    Args:
        policy: a `Policy`, or a spelling of one ("mixed_float16").
        scaler: a `LossScaler`; "dynamic", "off" or a preset's name ("torch", "megatron", ...); None lets the policy
            choose (dynamic for float16 with wider master weights, else off).
        optimizer: a polyamp spec, or the framework's own optimizer.
        clip_norm: maximum global L2 norm of the unscaled gradients (S11), or None.
        clip_value: maximum magnitude of each element of the unscaled gradients (S11), or None. Excludes `clip_norm`.
        clip_eps: what is added to the norm before it is compared with `clip_norm`: 1e-6 in torch's `clip_grad_norm_`,
            0 in optax and Keras.
        accumulate_steps: micro-batches per update (S8).
        ema: moving averages of the parameters for evaluation (S34), a `polyamp.Ema`, or None.
        aliases: names for modules whose paths differ between frameworks: `{"blocks/*": {"torch": "transformer/h/*",
            "tensorflow": "block_*", "jax": "h_*"}}`. Every glob over paths accepts them in addition to the framework's
            own paths: overrides of the policy, parameter groups. The policy stores them too.

    Raises:
        RecipeError: an impossible value or a contradiction.

    Example:
        >>> from polyamp import adamw
        >>> recipe = Recipe(policy="mixed_float16", optimizer=adamw(1e-3), clip_norm=1.0)
        >>> recipe.loss_scaler.init_scale
        32768.0
        >>> Recipe.from_toml(recipe.to_toml()) == recipe
        True
    """

    word: ClassVar[str] = "recipe"

    policy: Policy = Policy("float32")
    scaler: LossScaler | str | None = None
    optimizer: AnyOptimizer = AdamW()
    clip_norm: float | None = None
    clip_value: float | None = None
    clip_eps: float = 0.0
    accumulate_steps: int = 1
    ema: Ema | None = None
    aliases: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    _loss_scaler: ClassVar[LossScaler]  # per instance, no field; every step reads it

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            policy: Policy | str = ...,
            scaler: LossScaler | str | None = None,
            optimizer: AnyOptimizer = ...,
            clip_norm: float | None = None,
            clip_value: float | None = None,
            clip_eps: float = 0.0,
            accumulate_steps: int = 1,
            ema: Ema | None = None,
            aliases: Mapping[str, Mapping[str, str]] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.policy, str):
            self._set_field("policy", Policy(self.policy))
        if not isinstance(self.policy, Policy):
            raise RecipeError(
                "policy must be a polyamp.Policy or its spelling, such as 'mixed_float16'. Received: "
                f"{_format_argument('policy', self.policy)}.{_policy_hint(self.policy)}"
            )
        self._share_aliases()
        if isinstance(self.scaler, str):
            self._set_field("scaler", _scaler_from_name(self.scaler))
        if not isinstance(self.scaler, LossScaler | None):
            raise RecipeError(
                "scaler must be a polyamp.LossScaler, 'dynamic', 'off', a preset's name, or None, which lets "
                "the policy "
                "choose. A framework's own scaler would scale the loss a second time. Received: "
                f"{_format_argument('scaler', self.scaler)}.{_scaler_hint(self.scaler)}"
            )
        optimizer: Any = self.optimizer
        if not (is_spec(optimizer) or _is_native_optimizer(optimizer)):
            raise RecipeError(
                f"optimizer must be one of polyamp's specs ({', '.join(SPEC_NAMES)}) or a framework's own optimizer. "
                f"Received: {_format_argument('optimizer', optimizer)}.{_optimizer_hint(optimizer)}"
            )
        check_clip_limits(self.clip)
        steps = self.accumulate_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise RecipeError(
                f"accumulate_steps must be an integer of at least 1. Received: accumulate_steps={steps!r}."
                + plain_number_hint(steps)
            )
        if not isinstance(self.ema, Ema | None):
            raise RecipeError(
                "ema must be a polyamp.Ema, such as polyamp.Ema(decay=0.999), or None. Received: "
                f"{_format_argument('ema', self.ema)}.{_ema_hint(self.ema)}"
            )
        if self.ema is not None and is_spec(self.optimizer) and self.optimizer.has_average:
            raise RecipeError(
                f"{self.optimizer.tag} has an average of the parameters itself, which polyamp.averaged(state) gives. "
                f"Received: ema={self.ema!r} too. Leave it out."
            )
        self._set_field("_loss_scaler", self.scaler or LossScaler.for_policy(self.policy))
        if self.policy.param == "float16" and self.loss_scaler.scales:
            raise RecipeError(
                "a loss scaler needs float32 master weights: unscaled gradients underflow in float16 parameters. "
                f"Received: policy={self.policy}, scaler={self.loss_scaler.kind!r}. Use Policy('mixed_float16'), or "
                "scaler=LossScaler.off() to train in float16 as it is."
            )

    @property
    def clip(self) -> ClipLimits:
        """The limits of the gradients."""
        return ClipLimits(self.clip_norm, self.clip_value, self.clip_eps)

    def _share_aliases(self) -> None:
        """Make recipe and policy share aliases, so `recipe.policy.autocast(model)` reads overrides as the step does."""
        given, own = self.aliases, self.policy.aliases
        if given and given != own:
            policy = self.policy.replace(aliases=given)
            if own and own != policy.aliases:
                raise RecipeError(
                    f"aliases stand in the recipe ({', '.join(given)}) and in its policy ({', '.join(own)}), and they "
                    "differ. Give them to the recipe alone."
                )
            self._set_field("policy", policy)
        self._set_field("aliases", self.policy.aliases)

    def replace(self, **changes: Any) -> Self:
        """Return a changed copy; see `Record.replace`. A new policy keeps the recipe's aliases unless it has some."""
        if "aliases" not in changes and getattr(changes.get("policy"), "aliases", None):
            changes["aliases"] = changes["policy"].aliases
        return super().replace(**changes)

    def _init_arguments(self) -> dict[str, Any]:
        policy = self.policy.replace(aliases={}) if self.aliases else self.policy
        return {**self.to_dict(), "policy": policy}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name: `Recipe(**recipe.to_dict()) == recipe`."""
        return {**super().to_dict(), "aliases": self.policy.to_dict()["aliases"]}

    def _key(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in self.field_names if name != "aliases"])  # the policy has them

    @property
    def loss_scaler(self) -> LossScaler:
        """The scaler in use: `scaler`, or the policy's choice."""
        return self._loss_scaler

    @classmethod
    def from_dialect(
        cls,
        name: str,
        block: Any,
        *,
        total_steps: int | None = None,
        updates_per_epoch: int | None = None,
        leave_out: Sequence[str] = (),
    ) -> Recipe:
        """Read the options of another library; `polyamp.dialect_report` says what becomes of each key.

        Args:
            name: "transformers" (`TrainingArguments`), "timm" (arguments of `train.py`), "deepspeed" (its JSON) or
                "torchtitan" (its TOML or dataclasses).
            block: the options, as a dictionary or as the library's object.
            total_steps: number of updates of the training, in place of the block's.
            updates_per_epoch: number of updates of an epoch, if the block counts epochs.
            leave_out: keys that matter and cannot be mapped, which the recipe shall be read without.

        Raises:
            RecipeError: a key that is unknown, or matters and cannot be mapped, and is not in `leave_out`.

        >>> block = {"learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 100, "bf16": True}
        >>> recipe = Recipe.from_dialect("transformers", block, total_steps=1000)
        >>> recipe.clip_norm, recipe.optimizer.learning_rate
        (1.0, schedules.warmup_cosine(peak=0.0003, warmup_steps=100, total_steps=1000))
        """
        from polyamp.recipe.dialects.dialect_report import dialect_report

        report = dialect_report(name, block, total_steps=total_steps, updates_per_epoch=updates_per_epoch)
        report.check(leave_out)
        return cls(**report.fields)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe from a `.toml` or `.json` file. The policy is required; every other field has a default.

        Raises:
            RecipeError: no policy, as in an empty or truncated file; an unknown key, a wrong type or an impossible
                value. Names the file and the path in it.
            FileNotFoundError: there is no such file; lists similar names in the folder.
        """
        from polyamp.files import as_path, missing_file_error

        path = as_path(path, instead="A recipe made in code is polyamp.Recipe(...).")
        parse = _file_format(path)[0]
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise missing_file_error(path) from error
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path} is not UTF-8 text: {error}.") from error
        return parse(text, source=str(path))

    def dump(self, path: str | Path) -> None:
        """Write the recipe as a `.toml` or `.json` file that `load` reads back as an equal recipe.

        The file is replaced atomically. A truncated file never parses as a recipe.

        Raises:
            RecipeError: another suffix, or a native optimizer, which has no file format.
            OSError: the folder is missing or full; the older file is intact.
        """
        from polyamp.files import as_path, write_atomically

        path = as_path(path)
        text = _file_format(path)[1](self)
        write_atomically(path, text.encode())

    @classmethod
    def from_toml(cls, text: str, *, source: str = "TOML text") -> Recipe:
        """Parse a recipe from TOML; see `load`."""
        import msgspec

        return _decode(msgspec.toml.decode, source, _check_text(text, "TOML"))

    @classmethod
    def from_json(cls, text: str, *, source: str = "JSON text") -> Recipe:
        """Parse a recipe from JSON; see `load`."""
        import msgspec

        return _decode(msgspec.json.decode, source, _check_text(text, "JSON"))

    def to_toml(self) -> str:
        """Return the recipe as TOML. The policy's `compute` comes last, so a truncated text lacks it."""
        import msgspec

        plain = self._plain()
        policy = plain.pop("policy")
        tables = {name: policy.pop(name) for name in ("overrides", "op_rules") if name in policy}
        policy["compute"] = policy.pop("compute")
        parts = [part for part in (plain, {"policy": tables} if tables else {}, {"policy": policy}) if part]
        return "\n".join(msgspec.toml.encode(part).decode() for part in parts)

    def to_json(self) -> str:
        """Return the recipe as JSON."""
        import msgspec

        return msgspec.json.format(msgspec.json.encode(self._plain()), indent=2).decode()

    def _plain(self) -> dict[str, Any]:
        if not is_spec(self.optimizer):
            raise RecipeError(
                f"a native optimizer ({type(self.optimizer).__qualname__}) cannot be written to a file; use one of "
                "polyamp's specs, such as polyamp.adamw(...)."
            )
        from polyamp.recipe.serialization import to_plain_data

        fields: dict[str, Any] = to_plain_data(self)
        fields["policy"].pop("aliases", None)  # the recipe has them already
        if not self.aliases:
            del fields["aliases"]
        return fields


def _check_text(text: Any, form: str) -> str | bytes:
    if not isinstance(text, str | bytes):
        raise RecipeError(
            f"text must be {form} text. Received: {describe_value(text)}. To read a file: Recipe.load(path)."
        )
    return text


def _add_line_number(message: str, text: str | bytes) -> str:
    """Return a parser's message with the line number, if it reports another position."""
    content, newline = text.encode() if isinstance(text, str) else text, b"\n"
    last = content.rstrip().count(newline) + 1
    message = message.replace("(at end of document)", f"(at end of document, line {last})")
    return re.sub(r"\(byte (\d+)\)$", lambda found: f"(line {content[: int(found[1])].count(newline) + 1})", message)


def _decode(parse: Callable[[str | bytes], Any], source: str, text: str | bytes) -> Recipe:
    import msgspec

    from polyamp.recipe.serialization import record_from_data

    try:
        plain = parse(text)
        recipe: Recipe = record_from_data(plain, Recipe)
    except (msgspec.DecodeError, PolyampError) as error:
        raise RecipeError(f"{source}: {_add_line_number(str(error), text)}") from error
    if "policy" not in plain:
        raise RecipeError(
            f'{source}: no policy is named. A recipe in a file must name it, for instance policy = "float32", because '
            "an empty or cut-off file would otherwise train in float32 with AdamW. Received the keys: "
            f"{', '.join(plain) or 'none'}."
        )
    return recipe


def _scaler_from_name(name: str) -> LossScaler:
    if name == "dynamic":
        return LossScaler()
    if name == "off":
        return LossScaler.off()
    if name not in PRESETS:
        known = ("dynamic", "off", *PRESETS)
        close = " Did you mean 'off'?" if name.lower() in ("none", "no", "disabled", "") else did_you_mean(name, known)
        raise LossScaleError(f"scaler must be one of {', '.join(known)}. Received: {name!r}.{close}")
    return LossScaler.like(name)


def _is_native_optimizer(value: Any) -> bool:
    """Whether a value may be a framework's own optimizer: an object that is neither plain data, nor a class or a
    function that creates one."""
    if value is None or isinstance(value, _NON_OPTIMIZER_TYPES) or hasattr(value, "__next__"):
        return False
    return not (type(value) in (list, tuple, set, dict) or isinstance(value, Mapping | Record))


def _format_argument(name: str, value: Any) -> str:
    """Format a received value, with the argument's name if the value is short."""
    words = describe_value(value)
    return f"{name}={words}" if value is None or isinstance(value, str | bool | int | float) else words


def _policy_hint(value: Any) -> str:
    if value is None:
        return " For none: 'float32', the default."
    own = getattr(value, "name", None)
    if isinstance(own, str) and hasattr(value, "compute_dtype"):
        return f" Keras's policies go by their name: policy=policy.name ({own!r})."
    return spelling_hint(value)


def _scaler_hint(value: Any) -> str:
    if isinstance(value, bool):
        return f" Did you mean {'dynamic' if value else 'off'!r}?"
    if isinstance(value, int | float):
        return f" For a scale that never moves: polyamp.LossScaler.static({value!r})."
    return " Call it: polyamp.LossScaler()." if value is LossScaler else ""


def _ema_hint(value: Any) -> str:
    if isinstance(value, float) and 0.0 < value < 1.0:
        return f" Write ema=polyamp.Ema(decay={value!r})."
    return " Call it: polyamp.Ema()." if value is Ema else ""


def _optimizer_hint(value: Any) -> str:
    if isinstance(value, type):
        name = value.__name__.lower()
        made = f"polyamp.{name}(learning_rate=1e-3)" if name in SPEC_NAMES else "polyamp.adamw(learning_rate=1e-3)"
        return f" Call it: {made}, or the framework's own with its arguments."
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return " Call it, and pass what it returns: optax.adam(1e-3), polyamp.adamw(learning_rate=1e-3)."
    if isinstance(value, Mapping) and value.get("type") in SPEC_NAMES:
        return f" Write polyamp.{value['type']}(...); tables are for recipe files (Recipe.load)."
    if isinstance(value, str):
        close = closest_words(value, SPEC_NAMES, limit=1) or ["adamw"]
        return f" Write polyamp.{close[0]}(learning_rate=1e-3)."
    return " Write polyamp.adamw(learning_rate=1e-3)."


def _file_format(path: Path) -> tuple[Callable[..., Recipe], Callable[[Recipe], str]]:
    if path.suffix not in _FORMATS:
        raise RecipeError(f"a recipe file ends in .toml or .json. Received: {path.name!r}.")
    return _FORMATS[path.suffix]


_FORMATS: dict[str, tuple[Callable[..., Recipe], Callable[[Recipe], str]]] = {
    ".toml": (Recipe.from_toml, Recipe.to_toml),
    ".json": (Recipe.from_json, Recipe.to_json),
}
