# SPDX-License-Identifier: Apache-2.0
"""MaxText with the Megatron branch laid over it.

A module is looked for in this folder first and in `_release`, the released MaxText that the build brought in, second.
So `maxtext.trainers.pre_train.train` is the release's trainer, and it imports this branch's modules where there are any.
"""

import os

__path__ = [os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "_release")]

if not os.path.isfile(os.path.join(__path__[1], "__init__.py")):
  raise ImportError(
    f"{__path__[1]} is missing, so this is a source tree that was not installed; run `pip install -e .` in the checkout, "
    "which brings the released MaxText in."
  )

# The release's own package file sets TF_CPP_MIN_LOG_LEVEL, which must happen before anything imports JAX.
from maxtext import _release as _released
from maxtext.version import __author__ as __author__
from maxtext.version import __description__ as __description__
from maxtext.version import __version__ as __version__

__all__ = list(_released.__all__)


def __getattr__(name):
  # Only the release's lazy exports: its other attributes are sub-modules of `_release`, which must not shadow ours.
  if name in __all__:
    return getattr(_released, name)
  raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__():
  return __all__
