"""What a layout of a training job will cost, before anyone pays for it."""
