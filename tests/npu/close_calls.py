"""How near two tokens are where either may be taken, in standard deviations of logits."""

CLOSE = 0.1
"""In bfloat16."""

CLOSE_IN_INT8 = 0.25
"""Of int8 models, whose inputs may come to lie a level higher or lower."""
