"""The runner over vLLM's V2: a request keeps one row of the tables while it is scheduled."""
