"""`exponent_chart`: exponents of modules against what a dtype represents, for `polyamp.report_page`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyamp.float_formats import FORMATS
from polyamp.monitor.records import TensorStats
from polyamp.report_page.page import ChartLimit, HeatChart


def exponent_chart(title: str, named: Sequence[tuple[str, TensorStats]], compute: str) -> HeatChart:
    """Return the share of each module's elements by binary exponent, with the limits of the compute dtype.

    Args:
        title: of the chart.
        named: module and statistics, in the order of the program.
        compute: the dtype.
    """
    form = FORMATS[compute]
    normal, above = math.frexp(form.smallest_normal)[1] - 1, math.frexp(form.largest)[1]
    smallest = normal - form.fraction_bits - 1
    known = [(name, stats) for name, stats in named if stats.exponents]
    low = min((stats.first_exponent for _, stats in known), default=0)
    high = max((stats.first_exponent + len(stats.exponents) for _, stats in known), default=0)
    if form.needs_scale:  # the limits of other 16-bit dtypes are far from everything
        low, high = min(low, smallest - 1), max(high, above + 1)
    low = max(low, high - 100)
    shares = []
    for _, stats in known:
        own = dict(enumerate(stats.exponents, stats.first_exponent))
        shares.append([own.get(exponent, 0) / stats.elements for exponent in range(low, high)])
    limits = [
        ChartLimit(float(place - low), text)
        for place, text in (
            (smallest, f"below: zero in {compute}"),
            (normal, "below: subnormal"),
            (above, "from here: overflow"),
        )
        if low < place < high
    ]
    columns = [str(exponent) for exponent in range(low, high)]
    return HeatChart(title, [name for name, _ in known], columns, shares, "binary exponent", limits)
