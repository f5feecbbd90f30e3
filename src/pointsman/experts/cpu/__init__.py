"""The experts on a CPU, one file a technique."""
