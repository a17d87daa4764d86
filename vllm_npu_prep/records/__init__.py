"""Records of steps and scenarios: one form, its files, and its comparison with the oracle."""
