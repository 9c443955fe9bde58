"""One model on one instance: requests, scheduler, KV cache, runner, sampler, process and client.

The pure logic (request, step, block_pool, prefix_index, scheduler) holds no tensor, does no I/O and reads
no clock. Only `messages`, `process` and `client` need msgspec; everything else imports with torch and numpy.
"""
