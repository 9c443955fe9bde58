"""Requests that wait at a router for a replica."""
