"""Where the conformance suite used to be; it is `polyamp.conformance` now."""
