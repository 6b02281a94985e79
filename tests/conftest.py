"""Without a GPU, Triton's kernels run in its interpreter; set before any test is imported."""

import os

import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it has to be there before the first import of one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
