"""Long runs that are finished over several slices: their results, their clock, the suite's run."""
