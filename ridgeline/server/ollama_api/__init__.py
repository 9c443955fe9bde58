"""Ollama's API, except for model management: its bodies become chat, completion and embedding requests.

`request` has the bodies clients send, `conversion` makes other endpoints' requests of them, `shape` writes
answers as lines of JSON, `models` lists the served models. Nothing here loads, pulls or removes a model.
"""
