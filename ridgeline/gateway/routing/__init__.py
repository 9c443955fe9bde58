"""Chooses a route's model for a request: rules, nearest examples, a classifier, a cascade.

Only a route's name (`auto`) leads here. A request with a model's own name never does: `catalog` finds it.
"""
