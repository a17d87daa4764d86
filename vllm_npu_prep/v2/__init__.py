"""vLLM's Model Runner V2 over the parts that V1's runner uses, too: requests keep a slot each.

The same preparer, tables, staging ring, metadata builders, kernel families, checks and records;
what differs is who keeps requests, and how tokens are sampled.
"""
