"""The gateway between applications and models: keys, limits, retries, accounting, caches, routing.

It calls servers over HTTP and imports none of them.
"""
