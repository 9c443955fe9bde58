"""Chooses a route's model for a request: rules, nearest examples, a classifier, a cascade."""
