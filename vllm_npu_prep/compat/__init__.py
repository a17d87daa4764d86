"""Everything that belongs to one release of vLLM: how the plugin becomes active, and every patch.

No other package changes a name of vLLM, so a new release is mended here. Each module has the
patches of one subject, and each patch is a function that applies it once in a process.
"""
