# SPDX-License-Identifier: Apache-2.0
"""Stand-in: the EOD-aware fields of Megatron samples are computed in one compiled pass, see `_mmap_fields`.

`MegatronSplitInputsTargets` and `GenerateDocSegmentIds` give what the released classes give, element for element.
"""

from typing import TYPE_CHECKING

from maxtext._release.input_pipeline import input_pipeline_utils as release
from maxtext.input_pipeline import _mmap_fields as fields

if TYPE_CHECKING:
  from maxtext._release.input_pipeline.input_pipeline_utils import *  # noqa: F403

globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})

GenerateDocSegmentIds, MegatronSplitInputsTargets = fields.GenerateDocSegmentIds, fields.MegatronSplitInputsTargets
segments_and_positions = fields.segments_and_positions

# The release's pipelines look these up in their own module.
release.GenerateDocSegmentIds = GenerateDocSegmentIds  # pyrefly: ignore[bad-assignment]
release.MegatronSplitInputsTargets = MegatronSplitInputsTargets  # pyrefly: ignore[bad-assignment]
