"""What stands in for vLLM's Triton kernels, in torch."""
