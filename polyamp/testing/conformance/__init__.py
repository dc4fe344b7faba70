"""Old path of the conformance suite: `pytest --pyargs polyamp.testing.conformance` runs `polyamp.conformance`."""
