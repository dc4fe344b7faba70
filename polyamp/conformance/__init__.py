"""The conformance suite: one test per rule of the semantics (S1 to S26) and per trap that concerns the step.

    pytest --pyargs polyamp.conformance --polyamp-backend=torch

The rule's number stands in each test's name. The suite knows no framework: models and arrays come from the backend's
`Harness`, batches are NumPy, results are read through `Backend.to_numpy`.
"""
