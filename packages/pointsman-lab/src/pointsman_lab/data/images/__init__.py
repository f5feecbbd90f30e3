"""Images: layouts on the disk, a memory-mapped cache, augmentations and batches."""
