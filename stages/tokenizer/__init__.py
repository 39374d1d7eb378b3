"""First stage: chat templates and token ids."""
