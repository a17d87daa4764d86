"""Attention: metadata, the backend, the KV cache, masks on the device, and the kernel families."""
