"""The lab: plan, simulate, bench, tune, profile, and compare plans with measurements.

Beside the request path: it imports model descriptions and the engine's pure logic, and reaches servers only
over HTTP.
"""
