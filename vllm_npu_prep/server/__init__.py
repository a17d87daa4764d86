"""Writes records of a running server on request, and ends all its processes with it."""
