"""Code that looks at steps without an engine: ``explain``, record files, replays and the doctor."""
