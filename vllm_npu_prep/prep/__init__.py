"""The preparation of a step's inputs as pure functions over arrays: numpy and numba in, numpy out.

The package imports neither vLLM nor torch_npu, and can be used without them. `batch.prepare_step`
is its entry: it prepares a `batch.StepBatch`. `arrays` is the table of all arrays of a step,
`fused_pass` writes their values, and `oracle` computes the same values in plain loops.
"""
