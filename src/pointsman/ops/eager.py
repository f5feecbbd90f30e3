"""What torch.compile leaves alone: imported only while it traces, because it brings the whole compiler with it."""

import torch

from pointsman.ops import mixing

inform = torch.compiler.disable(mixing.inform)  # type: ignore[no-untyped-call]
inform_biased = torch.compiler.disable(mixing.inform_biased)  # type: ignore[no-untyped-call]
