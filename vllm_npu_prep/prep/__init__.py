"""Input preparation as pure functions over arrays: numpy and numba in, numpy out.

Imports neither vLLM nor torch_npu, and can be used without them.
"""
