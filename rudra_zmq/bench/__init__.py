"""``rudra bench``: the code that jobs run, timed against what the machine allows.

A heavy verb: the command line starts it as ``python -m rudra_zmq.bench``.
"""
