"""Which layer of one model is which of the other, and how the two differ: names, trees, pairs, ties, composites, the
order behind a flatten. Called by `settled`, `refusals`, `report`, `check`, `port` and `states`."""
