"""Transfer of training states: their sides, optimizer layouts, the canonical layout, and comparison of recipes."""
