"""Due tasks applied once: the owner of a partition of `due-tasks`, with its ledger."""
