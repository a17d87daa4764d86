"""What is decided before an engine starts: refusals, ranks, and what a Ray cluster offers."""
