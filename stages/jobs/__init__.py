"""What is slow, rare and repeatable: the steps of batches, as arq jobs. Never tokens."""
