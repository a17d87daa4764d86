"""Attention: metadata, backend, masks on the device, and the kernel families."""
