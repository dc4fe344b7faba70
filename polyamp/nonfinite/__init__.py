"""Where a training becomes inf or NaN, and whether a step gives the same bits twice."""
