"""The front door between applications and many models: keys, limits, retries, accounts, caches, routing.

It speaks to servers over HTTP and imports none of them.
"""
