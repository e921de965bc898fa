# SPDX-License-Identifier: Apache-2.0
"""The command line of the Megatron data system, `mmap-index`; see `main`."""
