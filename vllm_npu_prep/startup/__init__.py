"""Decisions before an engine starts: refusals, ranks, and the devices of a Ray cluster."""
