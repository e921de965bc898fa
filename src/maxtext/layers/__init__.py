# SPDX-License-Identifier: Apache-2.0
"""Package face: modules of this folder, then the release's."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
