"""Fused operators of torch_npu, by subject, and the layers of vLLM that they stand in for."""
