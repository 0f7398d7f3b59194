"""Kernel algorithms as small Python models at the level of passes, so that their logic is tested without a GPU."""
