"""Looking at a step without an engine."""
