"""What torch.compile leaves alone: imported only while it traces, because it brings the whole compiler with it."""

import torch

from pointsman.routers.mutual import streaming

inform = torch.compiler.disable(streaming.inform)  # type: ignore[no-untyped-call]
inform_biased = torch.compiler.disable(streaming.inform_biased)  # type: ignore[no-untyped-call]
