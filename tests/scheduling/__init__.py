"""vLLM's schedulers and ours, side by side."""
