"""The exact engine: model, kernels, paged KV, sampling, speculation. Knows tensors and no queues."""
