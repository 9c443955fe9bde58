"""One model on one instance: requests, scheduler, KV cache, runner, sampler, process and client.

The pure logic (plan, kv) has no tensors, does no I/O and reads no clock. Only `link` and `client` need
msgspec; everything else imports with torch and numpy.
"""
