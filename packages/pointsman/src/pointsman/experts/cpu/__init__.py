"""The experts on a CPU as one differentiable operation over `F.grouped_mm`: see ../README.md."""
