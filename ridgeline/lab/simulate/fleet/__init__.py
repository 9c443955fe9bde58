"""The fleet simulator: the fleet's router, queue, autoscaler and rollout classes on a simulated clock.

Replicas are simulated engines with the lab's step times. Up to EXACT_REPLICAS each one is simulated; larger
fleets are projected from a part of that size, and the result says so.
"""
