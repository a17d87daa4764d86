"""Code that watches an engine's steps from within: counts, checks, records and profiler phases."""
