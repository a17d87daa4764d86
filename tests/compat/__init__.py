"""Seams between the plugin and vLLM: a list of them, and what another release did to it."""
