"""What computes on the host, on the CPU fallback: packed weights, and compiled norms and rotary."""
