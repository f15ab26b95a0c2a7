"""Whether an optional package of kernels is there, whole, and for this device; importing this imports none."""

import importlib
import warnings

import torch

HOPPER = 9
ARCHITECTURES = (HOPPER, 10)  # major compute capabilities that the packages of the extra `fa4` have kernels for


def usable(interface: str, package: str, device: torch.device) -> bool:
    """Whether the module `interface` loads and this is a Hopper or Blackwell GPU. A package that is there but not whole is
    told of once.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in ARCHITECTURES:
        return False
    try:
        importlib.import_module(interface)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(interface.partition(".")[0]):
            return False
        warnings.warn(f"{package} lacks {error.name}: pip install 'dovetail[fa4]'; going on without it", stacklevel=3)
        return False
    except (ImportError, OSError) as error:
        warnings.warn(f"{package} does not load ({error}); going on without it", stacklevel=3)
        return False
    return True
