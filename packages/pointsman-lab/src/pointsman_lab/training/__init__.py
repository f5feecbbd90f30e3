"""Training: settings, schedules, the loop, checkpoints, run directories, and paired comparisons."""
