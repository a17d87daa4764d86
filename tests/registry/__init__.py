"""Every architecture of vLLM's registry, asked for with a tiny model."""
