"""The rules of `polyamp.lint`: figures of a set-up -> findings, each with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from polyamp.float_formats import FORMATS, HALF_DTYPES
from polyamp.linter.setup_figures import SetupFigures, StepCall
from polyamp.monitor.monitor_page import percent


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
        needs: the arguments of `polyamp.lint` without which it cannot be checked.
        possible: figures -> whether these arguments were passed.
    """

    name: str
    check: Callable[[SetupFigures], LintFinding | None]
    needs: str
    possible: Callable[[SetupFigures], bool]


def apply_rules(figures: SetupFigures) -> tuple[list[LintFinding], dict[str, str]]:
    """Return the findings, and the rules that could not be checked with what they need."""
    findings, unchecked = [], {}
    for rule in RULES:
        if not rule.possible(figures):
            if rule.name != "clip_before_unscale" or figures.records_steps:
                unchecked[rule.name] = rule.needs
        elif (found := rule.check(figures)) is not None:
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


def _always(figures: SetupFigures) -> bool:
    return True


def _has_moments(figures: SetupFigures) -> bool:
    return any(each.moments or each.with_gradient is not None for each in figures.weights)


def _has_run(figures: SetupFigures) -> bool:
    return figures.operations is not None


def _knows_dtypes(figures: SetupFigures) -> bool:
    return figures.dtypes is not None


_RUN: Final = "loss_fn and batch"
RULES: Final[Sequence[LintRule]] = (
    LintRule("parameters_in_16_bits", _half_parameters, "", _always),
    LintRule("moments_in_16_bits", _half_moments, "optimizer, loss_fn and batch", _has_moments),
    LintRule("norm_in_16_bits", _half_norm, _RUN, _has_run),
    LintRule("softmax_in_16_bits", _half_softmax, _RUN, _has_run),
    LintRule("scaler_without_float16", _scaler_without_float16, _RUN, _knows_dtypes),
    LintRule("float16_without_scaler", _float16_without_scaler, _RUN, _knows_dtypes),
    LintRule("clip_before_unscale", _clip_before_unscale, "step", lambda figures: figures.calls is not None),
    LintRule("head_in_16_bits", _half_head, _RUN, lambda figures: figures.head is not None),
)
"""All rules, in the order of a report."""
