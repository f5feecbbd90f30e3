"""The experts on a CPU, one file for each technique: see ../README.md."""
