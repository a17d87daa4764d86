"""What the API server does beside serving: it writes records, stops in order, and explains errors.

Its processes also watch their parents, so that none of them outlives the server.
"""
