"""Requests with a key that wait in a journal while no replica serves."""
