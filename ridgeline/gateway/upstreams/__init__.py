"""Upstreams, their credentials, and the retries at each of them."""
