"""Without a GPU, Triton's kernels run in its interpreter; set before any test is imported."""

import os
import signal

import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts into the background deaf to Ctrl-C, and children inherit that;
    # the tests that interrupt a run would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it has to be there before the first import of one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
