"""The runner over vLLM's V1: a request's row of the tables is its place in the batch."""
