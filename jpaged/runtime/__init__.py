"""Run the scheduler's plans on the device: batches, the KV pool, step functions, sampling."""
