# SPDX-License-Identifier: Apache-2.0
"""Stand-in: the version of this distribution, a local version of the release it lies over. The rest is the release's."""

from maxtext._release import version as release

__author__ = release.__author__
__description__ = release.__description__
__version__ = "0.2.5+megatron.1"
