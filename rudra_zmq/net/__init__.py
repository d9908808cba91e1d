"""Everything that touches ZeroMQ: the only package that imports zmq. Knows no job, no model and no daemon."""
