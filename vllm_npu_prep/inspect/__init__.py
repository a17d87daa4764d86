"""Looking at a step without an engine: what the commands show, record files, replays."""
