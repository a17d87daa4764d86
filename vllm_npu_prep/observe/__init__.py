"""Watching an engine's steps from within: counts, checks, records, profiler phases."""
