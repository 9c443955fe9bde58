"""Ollama's API, as far as it reads and computes: its bodies become chat, completion and embedding requests.

`request` are the bodies clients send, `conversion` makes requests of the other endpoints from them, `shape`
writes answers as lines of JSON, `models` tells what is served. Nothing here loads, pulls or removes a model.
"""
