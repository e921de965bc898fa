# SPDX-License-Identifier: Apache-2.0
"""Package face: this folder, then the release's folder of the same name."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
