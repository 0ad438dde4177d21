"""The deterministic simulator: production code on virtual time, one seed, every fault, and the promises watched."""
