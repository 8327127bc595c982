"""Which Python packages are here, without importing them: python tests/gpu/packages.py MODULE... prints the missing ones."""

import importlib.util
import sys
from importlib import metadata

# module -> distribution, as pyproject.toml has them
PACKAGES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "triton": "triton",
    "nvidia.dali": "nvidia-dali-cuda120",
    "timm": "timm",
    "numpy": "numpy",
    "PIL": "pillow",
    "submitit": "submitit",
    "yaml": "pyyaml",
    "tensorboard": "tensorboard",
    "jsonargparse": "jsonargparse",
    "rich": "rich",
    "safetensors": "safetensors",
    "matplotlib": "matplotlib",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}


def is_there(module: str) -> bool:
    """Whether a module can be found."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def version(module: str) -> str:
    """Of the distribution that has the module; "unknown" where the module lies there without one."""
    try:
        return metadata.version(PACKAGES[module])
    except metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    print(*[module for module in sys.argv[1:] if not is_there(module)], sep=", ")
