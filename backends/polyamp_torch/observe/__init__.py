"""Observation of a torch training module by module, for `polyamp.parity`. The entry point is `observer`."""
