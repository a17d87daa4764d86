"""Public reports of wrong answers, crashes and leaks, each played as a scenario on both runners."""
