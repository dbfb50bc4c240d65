"""Where the fused layer runs, and its launch parameters."""

import dataclasses

from pallas_kernels.tuning import MAX_SHARED_BYTES, is_hopper
from pallas_kernels.types import LayerSizes


@dataclasses.dataclass(frozen=True)
class FusedLayerConfig:
    """Programs (one an SM), pipeline stages and copies under way, each a unit of 16 KiB."""

    num_programs: int
    num_stages: int
    num_in_flight: int


def fused_layer_config(
    sizes: LayerSizes, *, num_tokens: int, dtype: str, num_cores: int | None, device_kind: str = ""
) -> FusedLayerConfig | None:
    """Where hopper.py runs; None where the ops it stands for do.

    Times on an H200: docs/kernels/layer.md.

    Args:
        sizes: Widths of the layer.
        num_tokens: Rows of the step's bucket.
        dtype: Name of the activations' and weights' dtype.
        num_cores: SMs of the GPU; None where it is not known.
        device_kind: The GPU's name.
    """
    whole = all(size % 128 == 0 for size in sizes)
    # Readers sum the partials: with eight real rows that costs a wide model more than it saves.
    narrow = sizes.hidden < 2048
    fits = whole and narrow and num_tokens == 8 and dtype == "bfloat16"
    if not (is_hopper(device_kind) and num_cores and fits):
        return None
    units = -(-sizes.hidden * max(sizes[1:]) // (num_cores * 8192))  # of a program, at most
    room = MAX_SHARED_BYTES - 8192 - (units + 1) * 128 * 8 * 2
    stages = min(12, room // 16384 // 2 * 2)
    # Few copies at a time delay the programs' exchange less.
    return FusedLayerConfig(num_cores, stages, num_in_flight=3) if stages >= 4 else None
