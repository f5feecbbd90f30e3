"""The experts of an MoE layer: modules, plain reference, and the paths that compute them."""
