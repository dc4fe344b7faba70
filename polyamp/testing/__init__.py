"""polyamp's testing tools: the conformance suite for any backend, the parity runner and the digits problem.

Run the suite on a backend of your own with `pytest --pyargs polyamp.testing.conformance --polyamp-backend=NAME`.
"""
