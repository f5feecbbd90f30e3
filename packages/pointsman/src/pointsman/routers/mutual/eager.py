"""What torch.compile leaves alone: imported only while it traces, because it brings the whole compiler with it.

torch.export leaves nothing alone: there all rows are one block, of plain operations.
"""

from torch import Tensor
from torch.compiler import disable, is_exporting

from pointsman.routers.mutual import streaming
from pointsman.routers.mutual.streaming import Bias, Prepare, Prepared
from pointsman.routers.mutual.visible import Visible

_inform = disable(streaming.inform)  # type: ignore[no-untyped-call]
_inform_biased = disable(streaming.inform_biased)  # type: ignore[no-untyped-call]


def inform(
    prepare: Prepare,
    batched: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    visible: Visible,
    normalization: bool,
) -> tuple[Tensor, Tensor]:
    if is_exporting():
        out, lse = streaming.biased_block(prepare(*batched, *shared), None, visible, 0, visible.length)
        return out, lse if normalization else lse[:, :0]
    result: tuple[Tensor, Tensor] = _inform(prepare, batched, shared, visible, normalization)
    return result


def inform_biased(prepared: Prepared, bias: Bias, visible: Visible) -> tuple[Tensor, Tensor]:
    if is_exporting():
        return streaming.biased_block(prepared, bias, visible, 0, visible.length)
    result: tuple[Tensor, Tensor] = _inform_biased(prepared, bias, visible)
    return result
