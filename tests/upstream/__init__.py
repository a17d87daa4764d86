"""vLLM's own tests, run with this plugin, and what is known of those that don't pass."""
