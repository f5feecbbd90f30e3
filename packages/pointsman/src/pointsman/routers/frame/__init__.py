"""What every router is built of: stages, registry, steps, capacity."""
