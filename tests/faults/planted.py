"""The faults of the core and the reference: what could be wrong in a rule, and which tests should see it.

Each is one replacement in one file. The tests are pytest's arguments, the quickest that should fail, or "conformance"
with a backend's name.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Fault(NamedTuple):
    """One fault.

    Attributes:
        room: whose: core, reference, torch, tensorflow or jax.
        name: the rule, and what is wrong.
        path: the file.
        before: what stands there, exactly once.
        after: what is put there.
        tests: tried in order until one of them fails.
    """

    room: str
    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


def core(name: str, path: str, before: str, after: str, *tests: str) -> Fault:
    return Fault("core", name, f"polyamp/{path}", before, after, tests)


def reference(name: str, before: str, after: str, chosen: str) -> Fault:
    tests = (f"conformance reference -k {chosen}",)
    return Fault("reference", name, "polyamp/reference/backend.py", before, after, tests)


OVERRIDES: Final = "tests/core/rules/test_overrides.py"
SCALE: Final = "tests/core/rules/test_scale.py"
RULES: Final = "tests/core/rules tests/core/recipe"

CORE: Final = (
    core(
        "S5 no wildcard inside a segment",
        "rules/overrides.py",
        "fnmatchcase(segments[0], globs[0])",
        "segments[0] == globs[0]",
        OVERRIDES,
    ),
    core("S5 the shortest glob wins", "rules/overrides.py", "return max(matching,", "return min(matching,", OVERRIDES),
    core(
        "S5 a glob does not cover what is inside",
        "rules/overrides.py",
        "if not globs:\n        return True",
        "if not globs:\n        return not segments",
        OVERRIDES,
    ),
    core(
        "S5 ** needs a segment behind it",
        "rules/overrides.py",
        "range(len(segments) + 1)",
        "range(len(segments))",
        OVERRIDES,
    ),
    core(
        "S3 16-bit masters mix too",
        "rules/plan.py",
        "and dtype in NARROW and policy.param != dtype",
        "and dtype in NARROW",
        RULES,
        "conformance reference -k s0",
    ),
    core(
        "S3 a plan with one float32 module never mixes",
        "rules/plan.py",
        "any(_mixes(policy, dtype)",
        "all(_mixes(policy, dtype)",
        RULES,
        "conformance reference -k s0",
    ),
    core(
        "S2 float64 as an output does not count",
        "rules/plan.py",
        "in (policy.param, policy.compute, policy.output)",
        "in (policy.param, policy.compute)",
        RULES,
        "conformance reference -k s02",
    ),
    core(
        "S5 inner modules forget the override around them",
        "rules/plan.py",
        "while found is None and path:",
        "while False:",
        RULES,
        "conformance reference -k s05",
    ),
    core("S15 growth a step late", "rules/scale.py", "good >= number(", "good > number(", SCALE),
    core(
        "S17 no floor",
        "rules/scale.py",
        "xp.maximum(scale * number(scaler.backoff_factor, scale), number(scaler.min_scale, scale))",
        "scale * number(scaler.backoff_factor, scale)",
        SCALE,
    ),
    core(
        "S17 no ceiling",
        "rules/scale.py",
        "xp.minimum(held * number(scaler.growth_factor, scale), number(scaler.max_scale, scale))",
        "held * number(scaler.growth_factor, scale)",
        SCALE,
    ),
    core(
        "S15 an overflow leaves the count",
        "rules/scale.py",
        "number(again, count), good), zero)",
        "number(again, count), good), state.good_steps)",
        SCALE,
    ),
    core(
        "S16 hysteresis never refills early",
        "rules/scale.py",
        "refill = finite if scaler.consecutive_hysteresis else grow",
        "refill = grow",
        SCALE,
    ),
    core(
        "S17 a finite step leaves `stuck`",
        "rules/scale.py",
        "stuck=xp.where(finite, zero,",
        "stuck=xp.where(finite, state.stuck,",
        SCALE,
    ),
    core(
        "S15 skips are not counted",
        "rules/scale.py",
        "xp.where(finite, state.skipped, state.skipped + number(1, count))",
        "xp.where(finite, state.skipped, state.skipped)",
        SCALE,
    ),
    core(
        "S16 a delayed growth comes early",
        "rules/scale.py",
        '= {"none": (0, 0), "after_overflow": (1, 1), "always": (1, 0)}\n',
        '= {"none": (0, 0), "after_overflow": (0, 1), "always": (1, 0)}\n',
        SCALE,
        "tests/core/rules/test_published_sequences.py",
    ),
    core("S11 small gradients are enlarged", "rules/clip.py", "xp.maximum(norm, limit)", "norm", "tests/core/rules"),
    core(
        "S14 every state by its own flag",
        "rules/decide.py",
        '(every if skip == "all" else found.finite)',
        "found.finite",
        "conformance reference -k s14",
    ),
    core(
        "S14 the scale by a state's own flag",
        "rules/decide.py",
        "scales.update(scaler, scale_state, every, xp)",
        "scales.update(scaler, scale_state, finite, xp)",
        "conformance reference -k s14",
    ),
    core(
        "S14 one finite state is enough",
        "rules/decide.py",
        "together = together & flag",
        "together = together | flag",
        "conformance reference -k s14",
    ),
    core(
        "S13 skipped updates count",
        "rules/decide.py",
        "step + xp.where(finite, one, zero)",
        "step + one",
        "conformance reference -k s13 or s12",
    ),
    core(
        "S17 one skip more than patience",
        "rules/stuck.py",
        "if skips < scaler.patience or",
        "if skips <= scaler.patience or",
        "conformance reference -k s17",
        "tests/core",
    ),
    core(
        "S8 a remainder is dropped",
        "rules/window.py",
        "(size + 1,) * larger + (size,) * (parts - larger)",
        "(size,) * parts",
        "tests/core/rules",
        "conformance reference -k s08",
    ),
    core(
        "S8 a smaller micro-batch counts as much as a larger one",
        "rules/window.py",
        "tuple(size / most for size in self.sizes)",
        "tuple(min(size, 1.0) for size in self.sizes)",
        "tests/core/rules",
        "conformance reference -k s08",
    ),
    core(
        "S28 a parameter with other values stays without a word",
        "rules/growing.py",
        "same is not None and same(path, path)",
        "same is not None",
        "conformance reference -k s28",
        "tests/core/rules",
    ),
    core(
        "S28 an object that lies elsewhere starts anew",
        "rules/growing.py",
        "            if old is not None:\n                found[path] = old",
        "            if old == path:\n                found[path] = old",
        "tests/core/rules",
    ),
    core(
        "S26 the wrong way round",
        "rules/batches.py",
        'if parameters != "float64"',
        'if parameters == "float64"',
        "conformance reference -k s26",
    ),
    core(
        "S24 an empty batch passes",
        "rules/batches.py",
        "if found and not any(",
        "if False and not any(",
        "conformance reference -k s24",
    ),
    core(
        "S20 a loss of any shape",
        "rules/refusals.py",
        "if shape not in ((), (1,)):",
        "if False:",
        "conformance reference -k s20",
    ),
    core(
        "S20 surplus gradients pass", "rules/refusals.py", "if missing or surplus:", "if missing:", "tests/core/rules"
    ),
    core(
        "S1 16-bit masters pass",
        "rules/refusals.py",
        "if dtype != wanted:",
        "if False:",
        "conformance reference -k s20 or s01",
    ),
    core(
        "S23 a loss of no parameter passes",
        "rules/refusals.py",
        "if all(shape is None",
        "if False and all(shape is None",
        "tests/core/rules",
    ),
    core(
        "Adam adds epsilon inside of the root",
        "recipe/optimizers.py",
        'root = xp.sqrt(new["exp_avg_sq"]) / corrected["root"] + self.eps',
        'root = xp.sqrt(new["exp_avg_sq"] + self.eps) / corrected["root"]',
        "tests/core/recipe/test_optimizers.py",
    ),
    core(
        "Nesterov is plain momentum",
        "recipe/optimizers.py",
        'step = grad + self.momentum * new["momentum"] if self.nesterov else new["momentum"]',
        'step = new["momentum"]',
        "tests/core/recipe/test_optimizers.py",
    ),
)

REFERENCE: Final = (
    reference(
        "S7 gradients stay scaled", "None if v is None else v / scale for", "None if v is None else v for", "s07"
    ),
    reference("S8 a sum in the place of the mean", "else value / by for", "else value for", "s08"),
    reference("S10 squares in float32", "dtype=np.float64)))", "dtype=np.float32)))", "s10"),
    reference("S12 a skipped step is applied", "if decision.skipped:", "if False:", "s12"),
    reference("S13 a parameter counts twice", "counts[name] + 1", "counts[name] + 2", "s13 or s21"),
    reference(
        "S6 the scale is a 16-bit number",
        "wide * states[0].scale_state.scale if",
        "wide * np.float16(states[0].scale_state.scale) if",
        "s06 or s10",
    ),
    reference("S8 16-bit gradients are added in 16 bits", "one.astype(np.float32) + other", "one + other", "s08"),
    reference(
        "S13 the rate of the next step",
        "member.rate(state.step, XP)",
        "member.rate(state.step + 1, XP)",
        "s13",
    ),
)
