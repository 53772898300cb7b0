"""KV caches in device memory."""
