"""Bytes of KV in shared memory: names, headers, codecs and quota. Knows nothing about queues or tensors."""
