"""``rudra doctor``: what is wrong with this host, the way to the head, the other hosts; and how to mend it."""
