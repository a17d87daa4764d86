"""What belongs to one version of vLLM: how the plugin becomes active, and every patch."""
