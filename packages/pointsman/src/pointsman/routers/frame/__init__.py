"""What every router is built of: entries, registry, stages and steps."""
