# SPDX-License-Identifier: Apache-2.0
"""Adapters to other libraries' kernels: tokamax, and tops, which are imported only when they are chosen.

Each is called with what the entry got: `(inputs, *, segment_ids, cu_seqlens, initial_state, options)`, and gives
`(o, final_state)`.
"""

from maxtext.kernels.kda._tokamax import tokamax_kda
from maxtext.kernels.kda._tops import tops_kda

__all__ = ["tokamax_kda", "tops_kda"]
