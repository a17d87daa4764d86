"""What another release of vLLM has otherwise than the pinned one, where the plugin relies on it."""
