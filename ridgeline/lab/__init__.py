"""The lab: plan, simulate, bench, tune, profile, and check the plan against the measurement.

Stands beside the request's way: it imports the models' descriptions and the engine's pure logic, and reaches
servers over HTTP alone.
"""
