"""The step loop: requests in, token events out, over one process boundary."""
