"""Replicas as one service: choose a replica, queue, scale, roll out, survive, place."""
