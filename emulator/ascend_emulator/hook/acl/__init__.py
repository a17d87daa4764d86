"""CANN's Python interface (pyACL), as far as programs were seen to use it."""
