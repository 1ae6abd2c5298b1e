"""Whether a target and its drafters decode on the device. Triton is not everywhere, so that what
needs it is imported where the answer may be yes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from decode.native.target import NativeTarget
from decode.types import Drafter, Target

if TYPE_CHECKING:
    from decode.device.parts import DeviceParts


def parts_on_device(
    target: Target, drafters: Mapping[str, Drafter]
) -> "tuple[dict[str, DeviceParts], list[str]] | None":
    """The parts of those that draft there, and the names of the others, which make all wait for
    the host; None where the target itself does not decode there.
    """
    if not isinstance(target, NativeTarget) or target.kernel_forward is None:
        return None
    from decode.device.parts import DeviceDrafter

    found: dict[str, DeviceParts] = {}
    for name, drafter in drafters.items():
        parts = drafter.on_device() if isinstance(drafter, DeviceDrafter) else None
        if parts is not None:
            found[name] = parts
    return found, [name for name in drafters if name not in found]
