"""Where host meets device: buckets, batches, the KV pool, step functions, the sampler."""
