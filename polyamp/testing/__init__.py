"""Former location of the conformance suite, which is now `polyamp.conformance`."""
