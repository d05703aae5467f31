"""What the host may read without waiting for a GPU."""

from torch import Tensor


def at_hand(tensor: Tensor) -> bool:
    """Whether reading its values makes nobody wait: it is not on another device."""
    return tensor.device.type == "cpu"


def may_hold(condition: Tensor) -> bool:
    """Whether a scalar bool tensor is True, as far as the host can tell without waiting."""
    return not at_hand(condition) or bool(condition)
