"""What several stages share: output text, sampling values, the handshake, KV in and out of blobs."""
