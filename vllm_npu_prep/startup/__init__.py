"""What is decided before an engine starts: what is refused, and the devices of a Ray cluster."""
