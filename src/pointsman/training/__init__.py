"""Training: settings, schedules, the loop, checkpoints and run directories."""
