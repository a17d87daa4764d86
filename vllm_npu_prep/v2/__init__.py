"""vLLM's Model Runner V2 on Ascend NPUs: each request keeps one request row while it is scheduled.

The preparer, tables, staging ring, metadata builders, attention families, checks and records are
those of the V1 runner. What differs is who keeps the requests, and how tokens are sampled.
"""
