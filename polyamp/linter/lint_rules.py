"""The rules of `polyamp.lint`: figures of a set-up -> findings, each with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from polyamp.float_formats import FORMATS, HALF_DTYPES
from polyamp.linter.setup_figures import SetupFigures, StepCall
from polyamp.monitor.monitor_page import percent
from polyamp.recipe.overrides import deciding_glob


class LintFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a set-up.

    Attributes:
        rule: name of the rule.
        places: parameters, modules with their operations, or source lines that it concerns.
        figure: what was measured.
        advice: what to do.
        share: the measured share, from 0 to 1; None for a rule that measures none.
    """

    rule: str
    places: list[str]
    figure: str
    advice: str
    share: float | None = None

    @property
    def where(self) -> str:
        """The first three places, and how many there are."""
        shown = ", ".join(self.places[:3])
        return f"{shown} and {len(self.places) - 3} more" if len(self.places) > 3 else shown


class LintRule(NamedTuple):
    """A rule of the lint.

    Attributes:
        name: as findings have it.
        check: figures -> the finding, or None.
        missing: figures -> what `polyamp.lint` needs to check it, "" if it has all; None if it does not concern them.
    """

    name: str
    check: Callable[[SetupFigures], LintFinding | None]
    missing: Callable[[SetupFigures], str | None]


def apply_rules(figures: SetupFigures) -> tuple[list[LintFinding], dict[str, str]]:
    """Return the findings, and the rules that could not be checked with what they need."""
    findings, unchecked = [], {}
    for rule in RULES:
        missing = rule.missing(figures)
        if missing:
            unchecked[rule.name] = missing
        elif missing is not None and (found := rule.check(figures)) is not None:
            findings.append(found)
    return findings, unchecked


def _half_parameters(figures: SetupFigures) -> LintFinding | None:
    weights = [each for each in figures.weights if each.dtype in HALF_DTYPES]
    if not weights:
        return None
    figure, share = f"trained in {_joined(each.dtype for each in weights)}", None
    moving = sum(each.with_gradient or 0 for each in weights)
    if moving:
        share = sum(each.unmoved or 0 for each in weights) / moving
        figure += f"; {percent(share)} of the weights with a gradient did not move in one step"
    return LintFinding(
        rule="parameters_in_16_bits",
        places=[each.name for each in weights],
        figure=figure,
        share=share,
        advice="Keep the trained parameters in float32 and let operations compute in 16 bits: an update that is "
        "smaller than half a digit of its weight is lost. Policy('mixed_bfloat16'), or autocast.",
    )


def _half_moments(figures: SetupFigures) -> LintFinding | None:
    found = [
        (f"{name} of {each.name}", dtype)
        for each in figures.weights
        for name, dtype in each.moments.items()
        if dtype in HALF_DTYPES
    ]
    if not found:
        return None
    return LintFinding(
        rule="moments_in_16_bits",
        places=[place for place, _ in found],
        figure=f"kept in {_joined(dtype for _, dtype in found)}",
        advice="Keep the optimizer's state in float32: a decay of 0.999 moves a 16-bit average by less than a digit, "
        "so it does not fall. Make the optimizer of float32 parameters.",
    )


def _half_norm(figures: SetupFigures) -> LintFinding | None:
    return _half_operation(figures, "norm", "means and variances lose digits, and float16 overflows above 65504")


def _half_softmax(figures: SetupFigures) -> LintFinding | None:
    return _half_operation(figures, "softmax", "16 bits round its sum and its small probabilities")


def _half_operation(figures: SetupFigures, kind: str, why: str) -> LintFinding | None:
    found = [each for each in figures.operations or () if each.kind == kind]
    if not found:
        return None
    return LintFinding(
        rule=f"{kind}_in_16_bits",
        places=[f"{each.module or '.'}: {each.name}" for each in found],
        figure=f"ran in {_joined(each.dtype for each in found)}",
        advice=f"Compute it in float32: {why}. policy.autocast does so; by hand, cast what it is given.",
    )


def _scaler_without_float16(figures: SetupFigures) -> LintFinding | None:
    if not figures.scales or "float16" in _all_dtypes(figures):
        return None
    return LintFinding(
        rule="scaler_without_float16",
        places=["scaler"],
        figure=f"the pass runs in {_joined(figures.dtypes or ())}, without float16",
        advice="Drop the scaler: bfloat16 and float32 reach as far as each other, so that it only costs time and skips "
        "steps.",
    )


def _float16_without_scaler(figures: SetupFigures) -> LintFinding | None:
    if figures.scales or "float16" not in _all_dtypes(figures):
        return None
    return LintFinding(
        rule="float16_without_scaler",
        places=["scaler"],
        figure=f"the pass runs in {_joined(figures.dtypes or ())}, and no scaler was passed that is on",
        advice=f"Scale the loss: gradients below 6e-8 become zero in float16. {figures.scaler_name}, or bfloat16.",
    )


def _clip_before_unscale(figures: SetupFigures) -> LintFinding | None:
    found = _scaled_clips(figures.calls or ())
    if not found:
        return None
    return LintFinding(
        rule="clip_before_unscale",
        places=[call.place for call in found],
        figure=f"{_joined(call.name for call in found)} clips gradients that are still multiplied by the scale",
        advice="Call scaler.unscale_(optimizer) before the clip: else the limit is that much smaller.",
    )


def _scaled_clips(calls: Iterable[StepCall]) -> list[StepCall]:
    found, unscaled = [], False
    for call in calls:
        if call.action == "clip" and not unscaled:
            found.append(call)
        unscaled = call.action == "unscale" or (unscaled and call.action != "step")
    return found


def _half_head(figures: SetupFigures) -> LintFinding | None:
    narrow = {name: dtype for name, dtype in (figures.head or {}).items() if _bits(dtype) < 32}
    if not narrow:
        return None
    return LintFinding(
        rule="head_in_16_bits",
        places=list(narrow),
        figure=f"stored in {_joined(narrow.values())}",
        advice="Leave the module that makes the logits in float32: half(), a cast or a quantisation of every layer "
        "reached it. Exclude it by name.",
    )


def _bits(dtype: str) -> int:
    if dtype in FORMATS:
        return FORMATS[dtype].bits
    return int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 32)


def _all_dtypes(figures: SetupFigures) -> set[str]:
    return {*(figures.dtypes or ()), *(each.dtype for each in figures.weights)}


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _override_of_head(figures: SetupFigures) -> LintFinding | None:
    overrides = figures.overrides or {}
    for path in {name.rpartition("/")[0]: None for name in figures.head or {}}:
        glob = deciding_glob(overrides, path)
        if glob is not None and glob != path and _bits(overrides[glob]) < 32:
            return LintFinding(
                rule="head_by_glob",
                places=[path],
                figure=f"{glob!r}: {overrides[glob]!r} of the policy's overrides covers it",
                advice=f"Write {path!r}: 'float32' too: the longer glob decides.",
            )
    return None


def _nothing(figures: SetupFigures) -> str:
    return ""


def _moments_missing(figures: SetupFigures) -> str:
    known = any(each.moments or each.with_gradient is not None for each in figures.weights)
    return "" if known else "optimizer, loss_fn and batch"


def _run_missing(figures: SetupFigures) -> str:
    return "" if figures.operations is not None else "loss_fn and batch"


def _dtypes_missing(figures: SetupFigures) -> str:
    return "" if figures.dtypes is not None else "loss_fn and batch"


def _step_missing(figures: SetupFigures) -> str | None:
    return "" if figures.calls is not None else "step" if figures.records_steps else None


def _head_missing(figures: SetupFigures) -> str:
    return "" if figures.head is not None else _run_missing(figures) or "logits that a module makes"


def _override_missing(figures: SetupFigures) -> str | None:
    return None if figures.overrides is None else _head_missing(figures)


RULES: Final[Sequence[LintRule]] = (
    LintRule("parameters_in_16_bits", _half_parameters, _nothing),
    LintRule("moments_in_16_bits", _half_moments, _moments_missing),
    LintRule("norm_in_16_bits", _half_norm, _run_missing),
    LintRule("softmax_in_16_bits", _half_softmax, _run_missing),
    LintRule("scaler_without_float16", _scaler_without_float16, _dtypes_missing),
    LintRule("float16_without_scaler", _float16_without_scaler, _dtypes_missing),
    LintRule("clip_before_unscale", _clip_before_unscale, _step_missing),
    LintRule("head_in_16_bits", _half_head, _head_missing),
    LintRule("head_by_glob", _override_of_head, _override_missing),
)
"""All rules, in the order of a report."""
