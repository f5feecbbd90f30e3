"""Models, assembled from blocks; each takes a router spec."""
