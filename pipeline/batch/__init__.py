"""Batches: a file of requests as a durable job. Lines in and out, the job's record and its files."""
